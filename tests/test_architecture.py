"""The shape of the package itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tpconvert

PACKAGE = Path(tpconvert.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports point from a line to the lines below it, or within the line where a package imports itself.
LEVELS = (
    {"cli", "options", "__main__"},
    {"loading", "train", "verify", "report", "planning", "source", "formats"},
    {"analyze", "checkpoint", "parallel"},
    {"spec"},
    {"errors", "terminal"},
)
# Within a line, some may use others: to load or train or verify a model one has to open it.
BESIDE = {
    "cli": {"options"},
    "formats": {"planning"},
    "__main__": {"cli"},
    "loading": {"source"},
    "train": {"source", "planning", "loading"},
    "verify": {"source", "planning"},
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next(i for i, names in enumerate(LEVELS) if name in names)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, late imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "__init__.py" or f.parent != PACKAGE], ids=str)
def test_imports_point_one_way(path):
    own = part(path)
    for module in imported(path):
        if not module.startswith("tpconvert."):
            continue
        other = module.split(".")[1]
        allowed = other == own or level(other) > level(own) or other in BESIDE.get(own, set())
        assert allowed, f"{path.relative_to(PACKAGE)} imports {module}"


def test_spec_needs_the_standard_library_only():
    for path in (PACKAGE / "spec").glob("*.py"):
        outside = {m.split(".")[0] for m in imported(path)} - set(sys.stdlib_module_names) - {"tpconvert"}
        assert not outside, f"{path.name} imports {outside}"


def test_only_source_imports_transformers():
    users = {part(path) for path in FILES if any(m.split(".")[0] == "transformers" for m in imported(path))}
    assert users <= {"source", "train"}, users


def test_files_stay_under_400_lines():
    long = {str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text().splitlines())) >= 400}
    assert not long


def test_packages_hold_few_files():
    """Besides what it exports, and what makes it a command: more are packages of their own, each one idea."""
    folders = {path.parent for path in FILES}
    own = {f: [p.name for p in f.glob("*.py") if p.name not in ("__init__.py", "__main__.py")] for f in folders}
    crowded = {str(f.relative_to(PACKAGE)): names for f, names in own.items() if len(names) > 6}
    assert not crowded


def test_functions_fit_a_screen():
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.body[0].lineno > 50
    ]
    assert not long


@pytest.mark.parametrize("statement", ["import tpconvert", "import tpconvert.cli", "import tpconvert.spec.plan"])
def test_light_imports_bring_no_torch(statement):
    code = (
        f"{statement}; import sys; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in tpconvert.__all__:
        assert name == "__version__" or callable(getattr(tpconvert, name)), name


def test_a_function_is_not_hidden_by_the_package_of_its_name():
    import tpconvert.verify.run

    assert callable(tpconvert.verify)
    assert tpconvert.verify is sys.modules["tpconvert.verify"].verify


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        tpconvert.nonesuch  # noqa: B018
