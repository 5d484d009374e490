"""The documents and the shipped workflows agree with the code: nodes, inputs, messages, files, commands."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.node_schemas import ROOT, Schema, read_schemas

SCHEMAS = read_schemas()
PAGES = ROOT / "web" / "docs"
WORKFLOWS = sorted((ROOT / "example_workflows").glob("*.json"))
DEMO = ROOT / "tools" / "demo_api.json"


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ----- the nodes' pages -----


def test_every_node_has_a_page_and_every_page_a_node() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(SCHEMAS)


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_a_page_names_every_input_and_output_and_no_other(node_id: str) -> None:
    schema = SCHEMAS[node_id]
    text = (PAGES / f"{node_id}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {schema.display_name}\n")
    assert "\n## Example\n" in text
    entries = re.findall(r"^- (\*\*.+?\*\*): ", text, flags=re.MULTILINE)  # no table: the page's panel is narrow
    named = [name for entry in entries for name in re.findall(r"\*\*(\w+)\*\*", entry)]
    assert sorted(named) == sorted([*(entry.name for entry in schema.inputs), *schema.outputs])


# ----- the README -----


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_the_readme_lists_every_node(node_id: str) -> None:
    assert f"[{SCHEMAS[node_id].display_name}](web/docs/{node_id}.md)" in readme()


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", readme())
    headings = re.findall(r"^#+ (.+)$", readme(), flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    broken = [target for target in targets if target.startswith("#") and target[1:] not in anchors]
    files = [target for target in targets if not target.startswith(("#", "https://"))]
    broken += [target for target in files if not (ROOT / target).exists()]
    assert files and not broken


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, flags=re.MULTILINE))
    used = set(re.findall(r"(?:^    |`)make (\w+)", readme(), flags=re.MULTILINE))
    assert {"demo", "test"} <= used <= targets
    assert targets - used <= {"help", "lint"}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-ranks.txt", "requirements-dev.txt"])
def test_the_readme_says_why_for_every_requirement(name: str) -> None:
    section = readme().partition("## Dependencies")[2].partition("\n## ")[0]
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    packages = [re.split(r"[<>=!~]", line)[0] for line in lines if line and not line.startswith("#")]
    assert packages and [package for package in packages if f"`{package}`" not in section] == []


@cache
def texts_in_the_code() -> str:
    """All texts of the package, one a line, with … for what is filled in when it runs."""
    found: list[str] = []
    for path in [ROOT / "install.py", *(ROOT / "nodes").glob("*.py"), *(ROOT / "parallel_core").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        found += [_text(node, constants) for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return "\n".join(found)


def _text(node: ast.expr, constants: dict[str, Any]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    name = node.value.id if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) else ""
    value = constants.get(name)
    return value if isinstance(value, str) else "…"


def messages_in_the_readme() -> list[str]:
    section = readme().partition("## Troubleshooting by message")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", section, flags=re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", messages_in_the_readme())
def test_a_message_of_the_readme_is_one_that_the_code_gives(message: str) -> None:
    assert message.rstrip("…") in texts_in_the_code()


def test_messages_are_found() -> None:
    assert len(messages_in_the_readme()) > 20


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_well_formed_and_described(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    children = {child.tag.rpartition("}")[2] for child in root}
    assert {"title", "desc"} <= children and "viewBox" in root.attrib


# ----- the workflows -----


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_one_for_the_page_with_a_thumbnail(path: Path) -> None:
    # ComfyUI lists every json file of this folder as a template: one in API format would open as an empty page.
    assert isinstance(load(path)["nodes"], list)
    assert path.with_suffix(".jpg").read_bytes()[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_saved_values_are_those_of_the_schemas_by_position(path: Path) -> None:
    ours = [node for node in load(path)["nodes"] if node["type"].startswith("PD_")]
    assert ours
    for node in ours:
        schema = SCHEMAS[node["type"]]
        assert {entry["name"] for entry in node["inputs"]} == {entry.name for entry in schema.inputs}
        assert [entry["name"] for entry in node["outputs"]] == list(schema.outputs)
        values = widget_values(node, schema)
        wrong = {entry.name: values[entry.name] for entry in schema.widgets if not entry.accepts(values[entry.name])}
        assert not wrong, node["type"]


def widget_values(node: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The page saves values by position, with one more after a seed that says what becomes of it."""
    names = [name for entry in schema.widgets for name in ([entry.name, "(control)"] if entry.seed else [entry.name])]
    return dict(zip(names, node["widgets_values"], strict=True))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_links_join_an_output_to_an_input(path: Path) -> None:
    workflow = load(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, source, output, target, slot, kind in workflow["links"]:
        assert link in nodes[source]["outputs"][output]["links"] and nodes[source]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][slot]["link"] == link and nodes[target]["inputs"][slot]["type"] == kind
    linked = [entry["link"] for node in nodes.values() for entry in node["inputs"] if entry["link"] is not None]
    assert sorted(linked) == sorted(link[0] for link in workflow["links"])


def test_the_demo_that_make_runs_is_the_one_in_the_template_browser() -> None:
    workflow, prompt = load(ROOT / "example_workflows" / "demo.json"), load(DEMO)
    shown = {str(node["id"]): node for node in workflow["nodes"] if node["type"] != "MarkdownNote"}
    assert {key: node["type"] for key, node in shown.items()} == {key: n["class_type"] for key, n in prompt.items()}
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    for key, node in shown.items():
        inputs = dict(prompt[key]["inputs"])
        for entry in node["inputs"]:
            if entry["link"] is not None:
                assert inputs.pop(entry["name"]) == sources[entry["link"]]
        schema = SCHEMAS.get(node["type"])
        if schema is not None:
            values = {name: value for name, value in widget_values(node, schema).items() if name != "(control)"}
            if "devices" in values:
                assert (values.pop("devices"), inputs.pop("devices")) == ("all", "cpu:2")
            assert inputs == values
