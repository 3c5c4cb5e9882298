"""Let the processes of tests start without torch._dynamo, whose import by the first optimizer takes 3 s of each.

In its place stands a module with the functions that an eager training calls, and they do nothing there. Whoever asks
it for anything else gets the real package from then on. `nox -s smoke` and `nox -s full` run without this.
"""

import contextlib
import importlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

NAME = "torch._dynamo"


def disable(function: Callable | None = None, *_: object, **__: object) -> Callable:
    """Return the function, or a decorator that does."""
    return function or disable


@contextlib.contextmanager  # which is also a decorator
def set_stance(*_: object, **__: object) -> Iterator[None]:
    """Do nothing: it says what to do with compiled code."""
    yield


CALLED: dict[str, dict[str, object]] = {  # of each module
    NAME: {"disable": disable, "graph_break": lambda *_, **__: None, "set_stance": set_stance},
    f"{NAME}.utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
    f"{NAME}.trace_rules": {"clear_lru_cache": lambda: None},
}
FILES = [Path(sysconfig.get_path("purelib"), f"lazy_dynamo{end}") for end in (".py", ".pth")]


class StandIn(types.ModuleType):
    """torch._dynamo, or a module of it, with the functions above."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(Finder.real(self.__name__), name)


class Finder:
    """It gives the first import of torch._dynamo a stand-in, and imports of its modules the real ones."""

    stands = True

    @classmethod
    def real(cls, name: str) -> types.ModuleType:
        """Return a module of the real package."""
        if cls.stands:
            cls.stands = False
            sys.modules.pop(NAME, None)
        return importlib.import_module(name)

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Answer an import, as Python's import system asks each finder."""
        if cls.stands and (name == NAME or name.startswith(f"{NAME}.")):
            return importlib.util.spec_from_loader(name, cls, is_package=name == NAME)  # type: ignore[arg-type]
        return None

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> types.ModuleType:
        """Make the stand-in with its modules, or import a real module."""
        if spec.name != NAME:
            return cls.real(spec.name)
        module, *parts = (StandIn(name) for name in CALLED)
        for part in (module, *parts):
            vars(part).update(CALLED[part.__name__])
        for part in parts:
            setattr(module, part.__name__.rpartition(".")[2], part)
        return module

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing is left to do."""


def switch_on() -> None:
    """Have every Python of this environment import this file at its start."""
    FILES[0].write_bytes(Path(__file__).read_bytes())
    FILES[1].write_text("import lazy_dynamo\n")


def switch_off() -> None:
    """Remove what switch_on has written."""
    for file in reversed(FILES):
        file.unlink(missing_ok=True)


if __name__ == "lazy_dynamo":
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
