"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver, no packages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waits import wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
_EXEC = (  # Chromium reads commands from file descriptor 3 and answers on 4
  "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
  " os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
  """One page. `profile`: an empty folder for what the browser keeps."""

  def __init__(self, profile: Path):
    their_in, self._to = os.pipe()
    self._from, their_out = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"]
    wrapped = [sys.executable, "-c", _EXEC, str(their_in), str(their_out), CHROMIUM, *flags]
    self._process = subprocess.Popen(
      [*wrapped, f"--user-data-dir={profile}", "about:blank"],
      pass_fds=(their_in, their_out),
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    os.close(their_in)
    os.close(their_out)
    self._profile = profile
    self._buffer, self._count, self._session = b"", 0, None
    self.complaints: list[str] = []  # errors of scripts, refused loads
    target = self._until_there()
    answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
    self._session = answer["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.send(f"{domain}.enable")

  def _until_there(self) -> str:
    targets = lambda: self.send("Target.getTargets")["targetInfos"]
    pages = wait_for(lambda: [each for each in targets() if each["type"] == "page"], "a page")
    return pages[0]["targetId"]

  def close(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    if (door := self._profile / "SingletonSocket").is_symlink():  # to a folder in /tmp
      shutil.rmtree(door.readlink().parent)
    os.close(self._to)
    os.close(self._from)

  def send(self, method: str, **params: Any) -> dict[str, Any]:
    """One command; returns its result."""
    self._count += 1
    command = {"id": self._count, "method": method, "params": params}
    if self._session:
      command["sessionId"] = self._session
    os.write(self._to, json.dumps(command).encode() + b"\0")
    while True:
      message = self._next()
      if message.get("id") == self._count:
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]
      self._listen(message)

  def _next(self) -> dict[str, Any]:
    while b"\0" not in self._buffer:
      data = os.read(self._from, 1 << 20)
      assert data, "the browser has ended"
      self._buffer += data
    line, _, self._buffer = self._buffer.partition(b"\0")
    return json.loads(line)

  def _listen(self, message: dict[str, Any]) -> None:
    params = message.get("params", {})
    if message.get("method") == "Runtime.exceptionThrown":
      self.complaints.append(json.dumps(params["exceptionDetails"]))
    elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
      self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

  # --- what tests do ------------------------------------------------------------------------------

  def open(self, url: str) -> None:
    self.send("Page.navigate", url=url)
    self.until("document.readyState === 'complete'")

  def ask(self, expression: str) -> Any:
    """The value of a JavaScript expression on the page."""
    answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def until(self, expression: str) -> Any:
    """Its first true value."""
    said = lambda: f"{expression}\n{self.ask('document.body.innerText')}"
    return wait_for(lambda: self.ask(expression), said)

  def text(self, selector: str) -> str:
    """What a reader sees of an element; "" where it is hidden or not there."""
    element = f"document.querySelector({json.dumps(selector)})"
    return self.ask(f"(e => e?.checkVisibility() ? e.innerText : '')({element})")

  def size(self, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    self.send("Emulation.setDeviceMetricsOverride", **metrics)

  def scheme(self, name: str) -> None:
    """light or dark, as the reader's system says."""
    feature = {"name": "prefers-color-scheme", "value": name}
    self.send("Emulation.setEmulatedMedia", features=[feature])

  def press(self, key: str) -> None:
    more = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
    if key == "Tab":
      more = {"windowsVirtualKeyCode": 9}
    for kind in ("keyDown", "keyUp"):
      self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

  def screenshot(self, path: Path) -> None:
    picture = self.send("Page.captureScreenshot", format="png")
    path.write_bytes(base64.b64decode(picture["data"]))
