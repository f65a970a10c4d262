"""A connection that leaves ends when the far end has seen the end, and not before."""

import contextlib
import socket

from ddiloco.network import frames


class Owner(frames.Owner):
  error: Exception | None = None

  def lost(self, wire, error):
    self.error = error


def test_what_is_said_after_the_end_does_not_break_the_connection():
  """The far end may take a while to close, and a sign of life be due meanwhile."""
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    far = stack.enter_context(socket.create_connection(listener.getsockname()))
    owner = Owner()
    wire = frames.FrameSocket(listener.accept()[0], owner)
    stack.callback(wire.close)
    wire.say(frames.Beat())
    wire.leave()
    wire.turn()
    assert far.recv(100) == frames.encode(frames.Beat()) and far.recv(100) == b""
    wire.say(frames.Beat())
    wire.turn()
    assert owner.error is None
    far.close()
    while owner.error is None:
      wire.turn()
