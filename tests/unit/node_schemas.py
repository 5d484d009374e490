"""The nodes' schemas as their source states them, read without ComfyUI.

Owns: finding the registered node classes and the literal parts of their `io.Schema`. Does not know: documents,
workflows, what ComfyUI makes of a schema.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NODES = ROOT / "nodes"
_WIDGETS = ("Int", "Float", "String", "Combo", "Boolean")


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input. `options`, `minimum` and `maximum` are None where the source does not say them literally."""

    name: str
    kind: str
    optional: bool
    seed: bool
    minimum: float | None
    maximum: float | None
    options: tuple[str, ...] | None

    @property
    def is_widget(self) -> bool:
        """Whether the page gives it a value of its own."""
        return self.kind in _WIDGETS

    def accepts(self, value: Any) -> bool:
        """Whether a widget of this kind can hold `value`."""
        kinds = {"Int": int, "Float": (int, float), "String": str, "Combo": str, "Boolean": bool}
        if not isinstance(value, kinds[self.kind]) or (self.kind != "Boolean" and isinstance(value, bool)):
            return False
        if self.options is not None and value not in self.options:
            return False
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One node: its inputs in the order in which the page shows them (optional ones last), its outputs' names."""

    node_id: str
    display_name: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]

    @property
    def widgets(self) -> tuple[Input, ...]:
        """The inputs that are saved as values."""
        return tuple(entry for entry in self.inputs if entry.is_widget)


def read_schemas() -> dict[str, Schema]:
    """Every node that nodes/extension.py registers, by id."""
    extension = ast.parse((NODES / "extension.py").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module
        for node in ast.walk(extension)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    listed = next(
        node for node in ast.walk(extension) if isinstance(node, ast.Return) and isinstance(node.value, ast.List)
    )
    names = [entry.id for entry in listed.value.elts]
    schemas = [_read_class(NODES / f"{modules[name]}.py", name) for name in names]
    return {schema.node_id: schema for schema in schemas}


def _read_class(path: Path, name: str) -> Schema:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    call = next(node for node in ast.walk(found) if isinstance(node, ast.Call) and _last_name(node.func) == "Schema")
    fields = {keyword.arg: keyword.value for keyword in call.keywords}
    known = _names(tree)
    inputs = [_input(entry, names) for entry, names in _entries(fields["inputs"], known, tree)]
    outputs = [
        ast.literal_eval(keyword.value)
        for entry, _ in _entries(fields["outputs"], known, tree)
        for keyword in entry.keywords
        if keyword.arg == "display_name"
    ]
    return Schema(
        node_id=ast.literal_eval(fields["node_id"]),
        display_name=ast.literal_eval(fields["display_name"]),
        inputs=tuple(sorted(inputs, key=lambda entry: entry.optional)),  # stable: the page shows optional ones last
        outputs=tuple(outputs),
    )


def _entries(inputs: Any, known: dict[str, Any], tree: ast.Module) -> list[tuple[Any, dict[str, Any]]]:
    """The calls that make the inputs, with the names that hold there: of a list, or of `[call for name in NAMES]`.

    What a function of the module, or of one beside it, returns stands for its call.
    """
    if isinstance(inputs, ast.Call) and isinstance(inputs.func, ast.Name):
        returned, others = _returned(inputs.func.id, tree)
        return _entries(returned, _names(others), others)
    if isinstance(inputs, ast.Call):
        return [(inputs, known)]
    if isinstance(inputs, ast.List):
        elements = [entry.value if isinstance(entry, ast.Starred) else entry for entry in inputs.elts]
        return [found for entry in elements for found in _entries(entry, known, tree)]
    (loop,) = inputs.generators
    return [(inputs.elt, {**known, loop.target.id: value}) for value in _value(loop.iter, known)]


def _returned(name: str, tree: ast.Module) -> tuple[ast.expr, ast.Module]:
    """What the function of that name returns, and the module that it is in."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and name in [alias.name for alias in node.names]:
            tree = ast.parse((NODES / f"{node.module}.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    found = next(node.value for node in function.body if isinstance(node, ast.Return))
    assert found is not None
    return found, tree


def _input(call: Any, known: dict[str, Any]) -> Input:
    given = {keyword.arg: _value(keyword.value, known) for keyword in call.keywords}
    options = given.get("options")
    return Input(
        name=_value(call.args[0], known),
        kind=_last_name(call.func.value),
        optional=bool(given.get("optional")),
        seed=bool(given.get("control_after_generate")),
        minimum=given.get("min"),
        maximum=given.get("max"),
        options=None if options is None else tuple(options),
    )


def _names(tree: ast.Module) -> dict[str, Any]:
    """What the module's own constants, and those it imports from parallel_core, are."""
    known: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = _value(node.value, known)
        if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
            module = importlib.import_module(node.module)
            known.update({alias.name: getattr(module, alias.name) for alias in node.names})
    return known


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of a literal, a known name or list(known name); None for anything that only runs in ComfyUI."""
    if isinstance(node, ast.Call) and _last_name(node.func) == "list" and len(node.args) == 1:
        return _value(node.args[0], known)
    if isinstance(node, ast.Name):
        return known.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
