"""The source executes nothing that a file says: checked on its syntax, with an example that breaks each rule."""

import ast
from pathlib import Path

import pytest

import permuteformer

SOURCE = Path(permuteformer.__file__).parent

CALLS = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
CALLS += ("yaml.load", "yaml.unsafe_load", "torch.hub.load", "torch.jit.load")
"""Functions that execute text, start a shell, make any object or import by name."""
MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
"""Modules that execute what they load; ``pickletools``, with which CIFAR-10 is read, lists instructions."""
KEYWORDS = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}
"""The only value that each keyword may have; it must be a constant."""
REQUIRED = {"torch.load": "weights_only"}


def forbidden(tree):
    """Yield the line and the name of everything that breaks a rule."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for keyword in given.keys() & KEYWORDS.keys():
                if not (isinstance(given[keyword], ast.Constant) and given[keyword].value is KEYWORDS[keyword]):
                    yield node.lineno, f"{keyword}={ast.unparse(given[keyword])}"
            if names[0] in REQUIRED and REQUIRED[names[0]] not in given:
                yield node.lineno, f"{names[0]} without {REQUIRED[names[0]]}"
        else:
            continue
        for name in names:
            if name in CALLS or (not isinstance(node, ast.Call) and name.split(".")[0] in MODULES):
                yield node.lineno, name


def trees():
    """Yield the name and the syntax of every file of the source."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_the_source_executes_nothing_that_it_reads():
    found = {name: list(forbidden(tree)) for name, tree in trees()}
    assert len(found) > 100
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "exec(text)",
        "compile(text, 'a', 'exec')",
        "__import__(name)",
        "import os\nos.system('ls')",
        "from os import system",
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "def f():\n    import dill",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, **options)",
        "loader(path, weights_only=chosen)",
        "import yaml\nyaml.load(text)",
        "from yaml import load",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=shell)",
        "numpy.load(path, allow_pickle=True)",
        "Auto.from_pretrained(path, trust_remote_code=True)",
        "torch.hub.load('a/b', 'c')",
    ],
)
def test_the_rules_find_what_they_forbid(text):
    assert list(forbidden(ast.parse(text)))


def test_only_modules_of_the_package_are_imported_by_computed_names():
    """The registries import the files of a package, and the package its public names."""
    computed = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and not isinstance(node.args[0], ast.Constant)
    }
    assert computed == {"__init__.py", "registry.py"}
