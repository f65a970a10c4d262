"""The source of the user's own parts: what roles must agree on, read once a run, and read anew."""

import concurrent.futures
import contextlib
import os
import py_compile
import sys
import threading
import types

import cloudpickle
import pytest

from ddiloco import custom
from ddiloco.config import ConfigError
from ddiloco.roles import initial
from tests.test_custom import MODEL, config


@pytest.mark.parametrize("name", ["edited.py", "edited_module"])
def test_a_source_that_changed_is_read_anew_by_the_next_run_and_not_before(
  tmp_path, monkeypatch, name
):
  """In a notebook its cell is run again; no cache may give the old model."""
  monkeypatch.syspath_prepend(tmp_path)
  path = tmp_path / f"{name.removesuffix('.py')}.py"
  mine = config("model", f"{path if name.endswith('.py') else name}:model")

  def found():
    return initial.initial_params(mine)["kernel"].shape, custom.identity(mine.model)

  path.write_text(MODEL)
  first = found()
  path.write_text(MODEL.replace('"size", 3', '"size", 30'))
  assert found() == first, "a run under way has one text"
  assert custom.renew(mine) is mine
  assert found()[0] == (30, 1) and found()[1] != first[1]
  path.write_text(MODEL)
  custom.renew(mine)
  assert found() == first


def test_a_file_is_compiled_as_python_itself_would(tmp_path):
  """It got the future statements of the module that reads it: its annotations were texts."""
  path = tmp_path / "mine.py"
  path.write_text(
    f"{MODEL}\ndef width(size: int): pass\nassert width.__annotations__ == {{'size': int}}\n"
  )
  custom.load_model(config("model", f"{path}:model").model)


def test_a_second_thread_waits_until_a_file_is_read(tmp_path, monkeypatch):
  """Of two runs that began together in one program, one was refused: as if the file began it."""
  begun, waits, lock = threading.Event(), threading.Event(), custom._reading

  @contextlib.contextmanager
  def seen():
    if begun.is_set():
      waits.set()
    with lock:
      yield

  told = types.SimpleNamespace(begin=lambda: (begun.set(), waits.wait(10)))
  monkeypatch.setitem(sys.modules, "told", told)
  monkeypatch.setattr(custom, "_reading", seen())
  path = tmp_path / "mine.py"
  path.write_text(f"import told\ntold.begin()\n{MODEL}")
  mine = config("model", f"{path}:model").model
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = pool.submit(custom.load_model, mine)
    assert begun.wait(10)
    monkeypatch.setattr(custom, "_reading", seen())
    second = pool.submit(custom.load_model, mine)
    assert first.result().shapes() == second.result().shapes()


def test_what_a_file_defines_reaches_a_process_that_grain_starts(tmp_path):
  """`mp_prefetch` pickled it by the name of a module that its processes did not find."""
  path = tmp_path / "mine.py"
  path.write_text(f"{MODEL}\nclass Row:\n  size = 3\ndef row(config):\n  return Row()\n")
  pickled = cloudpickle.dumps(custom.make(config("model", f"{path}:row").model, [], "row"))
  del sys.modules[custom._module_name(str(path))]
  assert cloudpickle.loads(pickled).size == 3


BESIDE = {
  "mine.py": f"{MODEL}\nimport optax, layers.sizes\ndef later():\n  from deep import half\n",
  "deep.py": "import os, ddiloco.nothing\n",
  "layers/__init__.py": "from .wide import WIDE\n",
  "layers/wide.py": "from . import far\n",
  "layers/far.py": "from . import *\n",
  "layers/sizes.py": "SIZE = 3\n",
}


def written(folder, changed: str = ""):
  """A config that names a file, which imports others of its folder; one of them may be changed."""
  for name, text in {**BESIDE, "other.py": "1 / 0\n", "ddiloco/nothing.py": ""}.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}# changed" if name == changed else text)
  return config("model", f"{folder}/mine.py:model").model


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_file_imports_from_its_folder_parts_roles_too(tmp_path, name):
  """Islands with other texts of it trained two models, and nothing said so."""
  mine = custom.identity(written(tmp_path / "mine"))
  assert custom.identity(written(tmp_path / "another", name)) != mine
  for unused in ("other.py", "ddiloco/nothing.py"):
    assert custom.identity(written(tmp_path / "copy", unused)) == mine


def test_what_a_module_imports_is_installed_as_it_is(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "lone_module.py").write_text("import beside_it\n")
  found = []
  for text in ("", "# changed"):
    (tmp_path / "beside_it.py").write_text(text)
    found.append(custom.identity(config("model", "lone_module:model").model))
  assert found[0] == found[1]


def test_what_a_file_imports_is_read_anew_as_well(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "sized.py").write_text("SIZE = 3")
  path = tmp_path / "sizing.py"
  path.write_text(MODEL.replace('config.options.get("size", 3)', "sized.SIZE") + "import sized\n")
  mine = config("model", f"{path}:model")
  # A script that names itself; a process of pytest-xdist has no file.
  monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
  first = custom.identity(mine.model), initial.initial_params(mine)["kernel"].shape
  (tmp_path / "sized.py").write_text("SIZE = 30")
  assert custom.identity(mine.model) == first[0], "a run under way has one text"
  custom.renew(mine)
  found = custom.identity(mine.model), initial.initial_params(mine)["kernel"].shape
  assert found[0] != first[0] and (first[1], found[1]) == ((3, 1), (30, 1))
  assert custom.identity(mine.model) == found[0] and "__main__" in sys.modules


@pytest.mark.parametrize("broken", ["sour.py", "sourer.py"])
def test_a_text_that_is_no_python_is_named_with_its_line(tmp_path, monkeypatch, broken):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "sourer.py").write_text("")
  (tmp_path / "sour.py").write_text("import sourer\n")
  (tmp_path / broken).write_text("\n\ndef model(:\n")
  said = rf"sour.py fails at {tmp_path}/{broken}, line 3 \(SyntaxError: "
  with pytest.raises(ConfigError, match=said):
    custom.check(config("model", f"{tmp_path}/sour.py:model"))


def test_bytecode_of_an_older_text_of_the_same_second_and_length_is_not_run(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("letter = 'a'")
  py_compile.compile(str(path), doraise=True)
  times = path.stat()
  path.write_text("letter = 'b'")
  os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
  assert custom._import(config("model", f"{path}:model").model).letter == "b"


def test_a_script_that_begins_a_run_when_it_is_read_is_refused(tmp_path):
  """It names a function of its own, and lacks `if __name__ == "__main__"`: each reading would begin
  another run."""
  path = tmp_path / "script.py"
  begins = "import ddiloco\nddiloco.plan({'model': {'custom': f'{__file__}:model'}}, gbps=1.0,"
  path.write_text(f"{MODEL}\n{begins} step_seconds=1.0)\n")
  rule = r"script.py is being read for it, and begins a run itself. Fix: put .* under `if __name__"
  for _ in range(2):
    with pytest.raises(ConfigError, match=f"^model.custom = .*{rule}"):
      custom.check(config("model", f"{path}:model"))
