"""Test the package as a whole: what it imports, its public names, and rules about its modules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import remuda
from remuda.registry import all_algorithms

ALGORITHMS = {entry.name: entry.options for entry in all_algorithms()}

SOURCE = Path(remuda.__file__).parent
TESTS = Path(__file__).parent


def fresh(code: str) -> str:
    """Return what a new interpreter prints for this code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["remuda", "remuda.core", "remuda.data", "remuda.envs", "remuda.cli", "remuda.cli.train"]
)
def test_importing_does_not_load_torch(module):
    assert fresh(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_help_does_not_load_torch():
    code = "import sys; from remuda.cli import main; main(['train', '--help'])"
    code = f"import contextlib\ntry:\n    {code}\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    assert fresh(code).splitlines()[-1] == "False"


def test_dunder_all_is_sorted_complete_and_importable():
    assert remuda.__all__ == sorted(remuda.__all__)
    assert set(remuda.__all__) == set(remuda._HOMES)
    for name in remuda.__all__:
        assert getattr(remuda, name) is not None
    assert set(remuda.__all__) <= set(dir(remuda))
    assert {name for name in dir(remuda) if not name.startswith("__")} == set(remuda.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = remuda.nonsense


def test_type_checkers_see_the_same_names():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(remuda.__all__)


def python_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def test_modules_stay_small():
    long = {str(path.relative_to(SOURCE)): n for path in python_files(SOURCE) if (n := lines(path)) > 400}
    assert not long


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_tests_are_at_least_as_long_as_the_source():
    assert sum(map(lines, python_files(TESTS))) >= sum(map(lines, python_files(SOURCE)))


def test_nothing_loads_code_from_data():
    """The package uses no pickle, eval or exec."""
    forbidden_modules, forbidden_calls = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, {"eval", "exec"}
    for path in python_files(SOURCE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & forbidden_modules, path
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.partition(".")[0] not in forbidden_modules, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden_calls, path


def test_schemes_sampling_and_learning_name_no_algorithm():
    words = set(ALGORITHMS)
    for room in ("schemes", "sampling", "learning"):
        for path in python_files(SOURCE / room):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
                assert not (isinstance(name, str) and name.lower() in words), path


def test_algorithms_do_not_step_optimizers_log_or_measure_time():
    """Algorithms only compute losses: they use no backward, step, item, logger or time."""
    for path in python_files(SOURCE / "algorithms"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in {"backward", "step", "item", "to", "zero_grad"}, path
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {name.partition(".")[0] for name in modules} & {"time", "logging", "rich"}, path


def test_command_line_tables_list_all_algorithms_and_schemes():
    from remuda.cli import tables
    from remuda.registry import algorithm_names, scheme_names

    assert [row[0] for row in tables.list_algorithms()] == algorithm_names()
    assert [row[0] for row in tables.list_schemes()] == scheme_names()
