"""The command that serves mission control, and its flags, which `train` shares."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from absl import flags

from ddiloco.cli.arguments import parse, workdir_flag
from ddiloco.config import ConfigError
from ddiloco.engines.dashboard import Dashboard, Where


def dashboard(arguments: list[str]) -> int:
  """Serves one page about the run in workdir, while it runs or afterwards, until Ctrl-C.

  It reads workdir and nothing else, so it may run anywhere that sees it.
  """
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_string("bind", "127.0.0.1:0", "HOST:PORT, port 0: a free one.", flag_values=values)
  access_flags(values)
  if not parse(values, arguments, dashboard.__doc__):
    return 0
  workdir = Path(values["workdir"].value)
  if not workdir.is_dir():
    raise ConfigError(f"--workdir={workdir}: is no directory. Fix: name the directory of a run.")
  ended = threading.Event()
  before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
  try:
    with Dashboard(workdir, where(values, "bind")) as served:
      print(f"Dashboard of {workdir}: {served.url}   (Ctrl-C ends it)", flush=True)
      ended.wait()
  except KeyboardInterrupt:
    print()
  finally:
    signal.signal(signal.SIGTERM, before)
  return 0


def access_flags(values: flags.FlagValues) -> None:
  """--token and --allow_faults."""
  flags.DEFINE_string(
    "token",
    "",
    "What the dashboard asks for; needed off loopback. @FILE reads it from a file, which hides it"
    " from `ps`.",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "allow_faults", False, "Faults may be injected from the dashboard.", flag_values=values
  )


def where(values: flags.FlagValues, flag: str) -> Where:
  """What the flags say; the address is that of `flag`."""
  token = values["token"].value
  if token.startswith("@"):
    try:
      token = Path(token[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
      raise ConfigError(f"--token={token}: cannot be read ({error}). Fix: name a file.") from error
    if not token:
      raise ConfigError(f"--token={values['token'].value}: is empty. Fix: write a token into it.")
  return Where(values[flag].value, token, values["allow_faults"].value, f"--{flag}")
