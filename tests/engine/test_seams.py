"""A vLLM that was never tried: its names and methods are looked for, and what is missing is named."""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from inducekv_vllm import SUPPORTED_VLLM, plugin
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.vllm_seams import seams
from inducekv_vllm.vllm_seams.patches import patch, patch_some

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_nothing_is_missing_here() -> None:
    assert seams.missing_seams() == []


@pytest.mark.parametrize(
    ("place", "names", "missing"),
    [
        ("vllm.nothing:Scheduler.schedule", (), "vllm.nothing.Scheduler.schedule"),
        (f"{SCHEDULER}.nothing", (), "vllm.v1.core.sched.scheduler.Scheduler.nothing"),
        (f"{SCHEDULER}.add_request", ("request", "other"), "Scheduler.add_request: the parameter other"),
    ],
)
def test_missing_methods(place: str, names: tuple[str, ...], missing: str) -> None:
    (found,) = seams._missing_seams({"ours.py": {place: names}})
    assert found.endswith(f"{missing} (ours.py)")


class Base:
    declared: int

    def __init__(self) -> None:
        self.of_base = 1


@dataclass
class Open(Base):
    of_instances: int

    def set(self) -> None:
        self.of_method: int = 1

    @property
    def computed(self) -> int:
        return 1


@dataclass(frozen=True)
class Frozen:
    of_instances: int


@dataclass(slots=True)
class Slotted:
    of_instances: int


def test_missing_attributes() -> None:
    names = ("declared", "of_base", "of_instances", "of_method", "computed")
    places = {f"{__name__}:Open": (*names, "nothing"), f"{__name__}:Gone": ("of_instances",)}
    found = list(seams._missing_seams({"ours.py": places}))
    assert found == [f"{__name__}.Open.nothing (ours.py)", f"{__name__}.Gone (ours.py)"]


def test_the_list_names_who_leans_on_what() -> None:
    """Each name is in its user's source, and each private one of vLLM's that any of our modules uses is in the list."""
    root, used = Path(seams.__file__).parents[2], dict[str, set[str]]()
    for package in seams.PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            used[str(path.relative_to(root))] = private_names(ast.parse(path.read_text()))
    for user, places in seams.SEAMS.items():
        text = (root / user).read_text()
        for place, names in places.items():
            if isinstance(seams._found(place), type):
                assert [name for name in names if name not in text] == [], (user, place)
    for user, names in used.items():
        listed = {part for place, found in seams.SEAMS.get(user, {}).items() for part in (*found, place.split(".")[-1])}
        assert names - listed - set(OTHERS) == set(), user


# Of torch and transformers, and what a function of vLLM's registers on layers.
OTHERS = ("_scaled_dot_product_flash_attention_for_cpu", "_C", "_config", "_from_config", "_k_scale", "_v_scale")


def private_names(tree: ast.AST) -> set[str]:
    """Those that a module reads of objects that are not its own, or replaces."""
    own, found = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Attribute(attr=name)):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Call(args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_start_in_which_there_is_nothing_to_replace_ends(is_there: bool) -> None:
    owner = SimpleNamespace(**({"check": 1} if is_there else {}))
    if is_there:
        patch_some([SimpleNamespace(), owner], "check", lambda found: found + 1, of="routes")
        patch(owner, "check", lambda found: found + 1)
        assert owner.check == 3
        return
    with pytest.raises(UnsupportedModel, match="replaces check of vLLM's routes, and this vLLM has none"):
        patch_some([SimpleNamespace(), owner], "check", lambda found: found + 1, of="routes")
    with pytest.raises(UnsupportedModel, match="replaces check of vLLM's SimpleNamespace, and this vLLM has none"):
        patch(owner, "check", lambda found: found + 1)


def test_outputs_that_take_no_new_attribute() -> None:
    found = list(seams._closed([f"{__name__}:{name}" for name in ("Open", "Frozen", "Slotted", "Gone")]))
    reason = "it takes no attribute of another name"
    assert found == [f"{__name__}.Frozen: {reason}", f"{__name__}.Slotted: {reason}", f"{__name__}.Gone"]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("vllm.v1.request:Request", "next_decode_eligible_step"),
        ("vllm.v1.core.sched.scheduler:Scheduler", "encoder_cache_mismatch_reqs"),
        ("vllm.v1.worker.gpu_model_runner:ExecuteModelState", "hidden_states"),
        ("vllm.config.parallel:ParallelConfig", "_api_process_rank"),
    ],
)
def test_a_missing_attribute_is_named_at_start(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = seams._attributes_of
    dotted = place.replace(":", ".")

    def without(kind: type) -> set[str]:
        return known(kind) - ({name} if f"{kind.__module__}.{kind.__qualname__}" == dotted else set())

    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    monkeypatch.setattr(seams, "_attributes_of", without)
    with pytest.raises(UnsupportedModel, match=rf"lacks 1 of the names .* the first is {dotted}\.{name}"):
        plugin.check_vllm_version("0.99.0")


def test_missing_names(tmp_path: Path) -> None:
    """Of imports that are tried, none is missing."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(
        "from vllm.sampling_params import SamplingParams, Nothing\n"
        "from vllm.nowhere import Something\n"
        "from vllm import sampling_params\n"
        "import vllm.elsewhere\n"
        "try:\n    from vllm.old import Place\nexcept ImportError:\n    from vllm.new import Place\n"
        "def late():\n    from vllm.config import Missing\n"
    )
    assert list(seams._missing_names(tmp_path / "package")) == [
        "vllm.sampling_params.Nothing (package/module.py)",
        "vllm.nowhere.Something (package/module.py)",
        "vllm.config.Missing (package/module.py)",
    ]


def test_a_newer_version_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    looked = []
    monkeypatch.setattr(seams, "missing_seams", lambda: looked.append(1) or [])
    for _ in range(2):
        plugin.check_vllm_version("0.99.0")
    # By id: where vLLM's own handlers are there, a record reaches the fixture twice.
    warned = {id(record): record.getMessage() for record in caplog.records if "is newer than" in record.getMessage()}
    assert (len(warned), len(looked)) == (1, 1)
    (text,) = warned.values()
    assert f"vLLM 0.99.0 is newer than the versions that InduceKV was tried with ({SUPPORTED_VLLM})" in text


def test_a_newer_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    monkeypatch.setattr(seams, "missing_seams", lambda: ["vllm.a.B.c", "vllm.d"])
    with pytest.raises(
        UnsupportedModel, match=r"found 0\.99\.0, which lacks 2 of the names .* the first is vllm\.a\.B\.c"
    ):
        plugin.check_vllm_version("0.99.0")


def test_an_older_version() -> None:
    plugin.check_vllm_version("0.32.1+cpu")
    with pytest.raises(UnsupportedModel, match=r"supports vLLM >=.*, found 0\.31\.9$"):
        plugin.check_vllm_version("0.31.9")
