"""Who may import whom: calib -> engines -> evals -> toolkit -> ui, each only what is to its left, no circles inside.

Every import statement counts: at the top of a file, inside a function, under TYPE_CHECKING. (`toolkit ui` starts
`python -m ui` as a process; that is no import.)
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("calib", "engines", "evals", "toolkit", "ui")
#: Foreign weight stands behind one door each.
DOORS = {"modelopt": {"calib/quantizer.py"}, "lm_eval": {"evals/accuracy.py"}, "streamlit": {"ui/"},
         "fastapi": {"toolkit/serve/app.py"}, "uvicorn": {"toolkit/serve/server.py", "toolkit/serve/connections.py"},
         "llguidance": {"engines/runtime/grammar.py"}}


def modules():
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def known():
    return modules()


def imports_of(name, path):
    """(imported module, line) of each import in a file; ``from a import b`` counts as a.b where that is a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[:len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in known() else base), node.lineno


def upward(name, path):
    room = ROOMS.index(name.split(".")[0])
    return [f"{path.relative_to(ROOT)}:{line} imports {target}" for target, line in imports_of(name, path)
            if target.split(".")[0] in ROOMS[room + 1:]]


def foreign(name, path):
    place = path.relative_to(ROOT).as_posix()
    return [f"{place}:{line} imports {target}" for target, line in imports_of(name, path)
            if (door := DOORS.get(target.split(".")[0])) and not any(place.startswith(prefix) for prefix in door)]


def circles(graph):
    """Strongly connected components with more than one module (Tarjan), and modules that import themselves."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1 or node in graph.get(node, ()):
                found.append(sorted(component))

    for node in list(graph):
        if node not in order:
            visit(node)
    return found


def graph_of(room):
    """Imports between the modules of one room. A package's own __init__ reached through a submodule does not count."""
    return {name: {target for target, _ in imports_of(name, path) if target in known() and target != name
                   and target.split(".")[0] == room}
            for name, path in known().items() if name.split(".")[0] == room}


def test_the_rooms_are_there():
    assert {name.split(".")[0] for name in known()} == set(ROOMS)


def test_imports_point_left():
    assert [fault for name, path in known().items() for fault in upward(name, path)] == []


def test_foreign_weight_has_one_door():
    assert [fault for name, path in known().items() for fault in foreign(name, path)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_circles_inside_a_room(room):
    assert circles(graph_of(room)) == []


def test_a_lazy_and_a_typing_import_are_seen(tmp_path):
    path = tmp_path / "lazy.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ui\ndef f():\n    from toolkit "
                    "import job\n")
    assert {target for target, _ in imports_of("calib.lazy", path)} == {"typing", "ui", "toolkit.job"}


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
