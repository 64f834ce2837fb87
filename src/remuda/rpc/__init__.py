"""Groups of peers that train one model together and apply the same updates in the same order."""
