"""Reads the #includes below penstock/ and fails on any edge between layers that the table does not allow.

Public headers may include public headers only. No tracked file may name a path of the machine it was written on.

    python3 tests/layers/layers_test.py
"""

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The layers that a layer may use besides itself.
LAYERS = {
    "base": [],
    "schedule": ["base"],
    "device": ["base"],
    "tensor": ["base", "device"],
    "transport": ["base", "device", "tensor"],
    "stage": ["base", "device", "tensor", "transport"],
    "program": ["base", "schedule", "tensor", "stage"],
    "runtime": ["base", "schedule", "device", "tensor", "transport", "stage"],
    "plan": ["base", "schedule", "program", "runtime"],
    "train": ["base", "schedule", "device", "tensor", "transport", "stage", "program", "runtime", "plan"],
    "cli": ["base", "schedule", "device", "tensor", "transport", "stage", "program", "runtime", "plan", "train"],
}

# Headers that only sources may include, so that they may use what sources may.
SOURCE_HEADERS = {"penstock/schedule/json.h"}

# Headers above the layers, which may include any public header. A source of the same name may include its header.
TOP_HEADERS = {"penstock/penstock.h", "penstock/torch_names.h"}

# Lists the public headers, one path relative to penstock/ in a line.
PUBLIC_HEADERS = "penstock/public_headers.txt"

SOURCES = {".h", ".hpp", ".cuh", ".inc", ".cc", ".cpp", ".cu"}
STANDARD = re.compile(r"[a-z0-9_]+")
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")

# Comments, raw strings, strings and characters, so that an #include inside them is ignored.
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|(?P<kept>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL
)
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(?P<target>.*?)[ \t\r]*$", re.MULTILINE)


def includes_of(text):
    """Yields (line, included name with its brackets or quotes)."""
    code = NO_CODE.sub(lambda match: match["kept"] or "\n" * match[0].count("\n"), text)
    for match in INCLUDE.finditer(code):
        yield code.count("\n", 0, match.start()) + 1, match["target"]


def objection_to(layer, is_header, include):
    """Returns why `layer` may not have this include, and what is allowed; None if it may."""
    quoted = re.fullmatch(r'"(.+)"', include)
    angled = re.fullmatch(r"<(.+)>", include)
    if not quoted and not angled:
        return "cannot be read without a preprocessor.", 'an include names its file: <vector>, "penstock/…"'
    name = (quoted or angled)[1]

    if name.startswith("penstock/"):
        form = f'"penstock/LAYER/…" with one of the layers {", ".join(LAYERS)}'
        if angled:
            return "is a header of Penstock in angle brackets.", form
        parts = name.split("/")
        if len(parts) < 3 or parts[1] not in LAYERS or ".." in parts:
            return "is in no layer.", form
        allowed = [layer, *LAYERS[layer]]
        if is_header and name in SOURCE_HEADERS and layer == "schedule":
            return "is in a header.", "only sources may use it"
        if parts[1] not in allowed:
            return f"leads from {layer} to {parts[1]}.", f"{layer} may use {', '.join(allowed)}"
        return None
    if quoted:
        return "is not named from the root.", 'headers of Penstock as "penstock/LAYER/…", any other in angle brackets'

    if name.startswith("CLI/") and layer != "cli":
        return f"leads from {layer} to CLI11.", "only cli may use CLI11"
    if layer == "schedule":
        allowed = "schedule may use the standard library" + ("" if is_header else " and nlohmann::json")
        if TORCH.match(name):
            return "leads from schedule to libtorch.", allowed
        if name.startswith("nlohmann/"):
            return ("is in a header, so that its users would need nlohmann::json.", allowed) if is_header else None
        if not STANDARD.fullmatch(name):
            return "is not in the standard library.", allowed
    return None


def wrong_edges(root):
    """Returns a message for each include or file below root/penstock that breaks the rules."""
    messages = []
    layers = f"the layers are {', '.join(LAYERS)}"
    for folder in sorted((root / "penstock").iterdir()):
        if folder.is_dir() and folder.name not in LAYERS:
            messages.append(f"penstock/{folder.name}: is not a layer.\n  Allowed: {layers}; a new one gets a row here")
    for path in sorted((root / "penstock").rglob("*")):
        if path.suffix not in SOURCES or not path.is_file():
            continue
        place = path.relative_to(root)
        if place.as_posix() in TOP_HEADERS:
            continue
        if len(place.parts) < 3:
            messages.append(f"{place}: is in no layer.\n  Allowed: {layers}")
        layer = place.parts[1]
        if len(place.parts) < 3 or layer not in LAYERS:
            continue
        is_header = path.suffix not in {".cc", ".cpp", ".cu"} and place.as_posix() not in SOURCE_HEADERS
        own_headers = {f'"{header}"' for header in TOP_HEADERS if Path(header).stem == path.stem}
        for line, include in includes_of(path.read_text(encoding="utf-8")):
            objection = None if include in own_headers else objection_to(layer, is_header, include)
            if objection:
                messages.append(f"{place}:{line}: #include {include} {objection[0]}\n  Allowed: {objection[1]}")
    return messages


def private_includes(root):
    """Returns a message for each public header that is missing or includes a private one; None without a list of them."""
    if not (root / PUBLIC_HEADERS).is_file():
        return None
    public = [f"penstock/{line}" for line in (root / PUBLIC_HEADERS).read_text(encoding="utf-8").split()]
    messages = []
    for name in public:
        if not (root / name).is_file():
            messages.append(f"{PUBLIC_HEADERS}: {name} does not exist.\n  Allowed: paths relative to penstock/")
            continue
        for line, include in includes_of((root / name).read_text(encoding="utf-8")):
            included = include.strip('"<>')
            if included.startswith("penstock/") and included not in public:
                messages.append(
                    f"{name}:{line}: #include {include} is a private header in a public one.\n"
                    f"  Allowed: the headers of {PUBLIC_HEADERS}, and forward declarations"
                )
    return messages


def tracked_files(root):
    """Returns the paths of the files that git tracks below root, or None without git."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [root / name for name in listed.decode().split("\0") if name]


def machine_paths(files, root, own=(ROOT, Path.home())):
    """Returns a message for each line that names a home, or one of the folders `own`."""
    homes = r"root\b|work/|home/[a-z]|Users/[A-Za-z]|opt/[a-z]"
    # Short paths such as / or /src would be found everywhere.
    folders = [re.escape(str(path)) for path in own if len(path.parts) > 2]
    pattern = re.compile(rf"(?<![\w.$)}}*/-])(?:/(?:{homes})|{'|'.join([*folders, '(?!)'])})")
    messages = []
    for path in files:
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        for line, text in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            found = pattern.search(text)
            if found:
                messages.append(
                    f"{path.relative_to(root)}:{line}: {text[found.start():][:60]!r} is a path of one machine.\n"
                    "  Allowed: paths relative to the repository, or found at run time"
                )
    return messages


class Layers(unittest.TestCase):
    def test_each_layer_uses_only_what_its_row_names(self):
        messages = wrong_edges(ROOT)
        if messages:
            self.fail("\n" + "\n".join(messages))

    def test_layers_use_only_layers_above_them_in_the_table(self):
        names = list(LAYERS)
        for layer, uses in LAYERS.items():
            for used in uses:
                self.assertLess(names.index(used), names.index(layer), f"{layer} uses {used}, which is below it")

    def test_the_header_of_everything_includes_every_public_header(self):
        public = set((ROOT / PUBLIC_HEADERS).read_text("utf-8").split())
        text = (ROOT / "penstock" / "penstock.h").read_text("utf-8")
        included = {include.strip('"').removeprefix("penstock/") for _, include in includes_of(text)}
        self.assertEqual(included, public - {"penstock.h"})

    def test_public_headers_include_public_headers_only(self):
        messages = private_includes(ROOT)
        self.assertIsNotNone(messages, f"there is no {PUBLIC_HEADERS}")
        if messages:
            self.fail("\n" + "\n".join(messages))

    def test_there_are_includes_to_check(self):
        headers = [path for path in (ROOT / "penstock").rglob("*.h") if list(includes_of(path.read_text("utf-8")))]
        self.assertTrue(headers, "no header below penstock/ includes anything")


class MachinePaths(unittest.TestCase):
    def test_no_tracked_file_names_one(self):
        files = tracked_files(ROOT)
        if files is None:
            self.skipTest("not a git checkout")
        messages = machine_paths(files, ROOT)
        if messages:
            self.fail("\n" + "\n".join(messages))


class Rules(unittest.TestCase):
    """Tests the rules on trees that break them."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def assert_reported(self, name, text, *parts):
        self.write(name, text)
        messages = wrong_edges(self.root)
        self.assertEqual(len(messages), 1, messages)
        for part in parts:
            self.assertIn(part, messages[0])

    def test_an_edge_upwards_is_reported_with_place_and_remedy(self):
        self.assert_reported(
            "penstock/stage/stage.h",
            '#pragma once\n\n#include <vector>\n#include "penstock/runtime/pipeline.h"\n',
            'penstock/stage/stage.h:4: #include "penstock/runtime/pipeline.h" leads from stage to runtime.',
            "Allowed: stage may use stage, base, device, tensor, transport",
        )

    def test_an_edge_that_only_skips_a_row_is_reported(self):
        self.assert_reported(
            "penstock/plan/plan.cc", '#include "penstock/tensor/value.h"\n', "leads from plan to tensor", "runtime"
        )

    def test_torch_in_schedule_is_reported(self):
        for name in ["torch/torch.h", "ATen/ATen.h", "c10/util/Exception.h", "caffe2/serialize/inline_container.h"]:
            with self.subTest(name):
                self.assert_reported("penstock/schedule/a.cc", f"#include <{name}>\n", name, "schedule to libtorch")

    def test_another_library_in_schedule_is_reported(self):
        self.assert_reported("penstock/schedule/a.cc", "#include <unistd.h>\n", "<unistd.h> is not in the standard")

    def test_json_is_for_the_sources_of_schedule(self):
        self.write("penstock/schedule/costs.cc", "#include <nlohmann/json.hpp>\n")
        self.assertEqual(wrong_edges(self.root), [])
        self.assert_reported("penstock/schedule/costs.h", "#include <nlohmann/json.hpp>\n", "costs.h:1", "in a header")

    def test_cli11_is_for_cli(self):
        self.write("penstock/cli/main.cc", "#include <CLI/CLI.hpp>\n")
        self.assertEqual(wrong_edges(self.root), [])
        self.assert_reported("penstock/train/loop.cc", "#include <CLI/CLI.hpp>\n", "leads from train to CLI11")

    def test_a_header_that_is_not_named_from_the_root_is_reported(self):
        self.assert_reported("penstock/schedule/csv.cc", '#include "csv.h"\n', "not named from the root", "penstock/LAYER")

    def test_a_header_of_penstock_in_angle_brackets_is_reported(self):
        self.assert_reported("penstock/cli/main.cc", "#include <penstock/schedule/csv.h>\n", "angle brackets")

    def test_a_path_around_the_layers_is_reported(self):
        self.assert_reported("penstock/tensor/a.cc", '#include "penstock/tensor/../runtime/a.h"\n', "in no layer")

    def test_an_include_by_macro_is_reported(self):
        self.assert_reported("penstock/tensor/a.cc", "#include HEADER\n", "a.cc:1", "HEADER cannot be read")

    def test_an_unknown_folder_is_reported(self):
        self.assert_reported("penstock/helpers/strings.h", "#include <string>\n", "penstock/helpers: is not a layer")

    def test_a_source_outside_of_the_layers_is_reported(self):
        self.assert_reported("penstock/strings.h", "#include <string>\n", "penstock/strings.h: is in no layer")

    def test_the_top_headers_may_include_every_layer(self):
        self.write("penstock/penstock.h", '#include "penstock/runtime/pipeline.h"\n#include "penstock/tensor/nested.h"\n')
        self.write("penstock/torch_names.h", '#include "penstock/penstock.h"\n')
        self.assertEqual(wrong_edges(self.root), [])

    def test_a_private_header_in_a_public_one_is_reported(self):
        self.assertIsNone(private_includes(self.root))
        self.write("penstock/public_headers.txt", "stage/stage.h\nstage/module.h\n")
        self.write("penstock/stage/module.h", "#include <string>\n#include <torch/torch.h>\n")
        stage = self.write("penstock/stage/stage.h", '#include "penstock/stage/module.h"\n')
        self.assertEqual(private_includes(self.root), [])
        stage.write_text('#pragma once\n#include "penstock/stage/recompute.h"\n', encoding="utf-8")
        messages = private_includes(self.root)
        self.assertEqual(len(messages), 1, messages)
        self.assertIn('penstock/stage/stage.h:2: #include "penstock/stage/recompute.h" is a private header', messages[0])

    def test_a_public_header_that_does_not_exist_is_reported(self):
        self.write("penstock/public_headers.txt", "stage/stage.h\n")
        messages = private_includes(self.root)
        self.assertEqual(len(messages), 1, messages)
        self.assertIn("penstock/stage/stage.h does not exist", messages[0])

    def test_comments_and_strings_are_ignored(self):
        self.write(
            "penstock/schedule/a.cc",
            '// #include <torch/torch.h>\n/*\n#include <torch/torch.h>\n*/\n'
            'auto text = R"x(\n#include <torch/torch.h>\n)x";\nauto glob = "/*";\n',
        )
        self.assertEqual(wrong_edges(self.root), [])
        self.assert_reported(
            "penstock/schedule/b.cc", "/* a\nb */\n#  include <torch/torch.h>  // why\n", "b.cc:3", "<torch/torch.h>"
        )

    def test_paths_of_a_machine_are_reported(self):
        for path in ["/" + "root/.cache", "/" + "home/ada/src", "/" + "work/main", "/" + "Users/Ada/src", str(self.root)]:
            with self.subTest(path):
                file = self.write("notes.md", f"first\nsee {path} for it\n")
                messages = machine_paths([file], self.root, own=(self.root,))
                self.assertEqual(len(messages), 1, path)
                self.assertIn(f"notes.md:2: '{path}", messages[0])

    def test_other_paths_are_not(self):
        text = "/usr/include /tmp/x $PREFIX/work/ ${HOME}/root build/work/x https://example.org/home/ada `/`\n"
        file = self.write("notes.md", text)
        self.assertEqual(machine_paths([file], self.root, own=(self.root, Path("/"))), [])


if __name__ == "__main__":
    unittest.main()
