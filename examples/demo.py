"""`make demo`: a mesh, a question, its trace, and a clean stop. All that it runs are commands for you to run, too."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshfire.cluster import state
from meshfire.errors import NotFound

ROOT = Path(__file__).resolve().parents[1]
MESHFIRE = str(Path(sys.executable).parent / "meshfire")
TOPOLOGY = ROOT / "examples" / "demo-topology.yaml"
MESH = "demo"
QUESTION = "What is the capital of France, and what is it famous for?"
START_TIMEOUT_S = 180.0


def main() -> int:
    with tempfile.TemporaryFile() as output:
        command = [MESHFIRE, "up", "--topology", str(TOPOLOGY)]
        print(f"$ {' '.join(['meshfire', *command[1:]])}", flush=True)
        mesh = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            if not wait_until_serving(mesh):
                output.seek(0)
                print(output.read().decode(errors="replace"), file=sys.stderr)
                return 1
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)
            code = run("status") or run("chat", QUESTION, "--max-tokens", "128", "--temperature", "0", "--stats")
            time.sleep(1.0)  # spans leave their processes within a quarter of a second
            return code or run("trace", "last")
        finally:
            stop(mesh)


def wait_until_serving(mesh: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while mesh.poll() is None and time.monotonic() < deadline:
        try:
            if all(one.health == "serving" for one in state.read(MESH).processes):
                return True
        except NotFound:
            pass
        time.sleep(0.3)
    return False


def run(verb: str, *arguments: str) -> int:
    print(f"\n$ meshfire {' '.join([verb, '--mesh', MESH, *arguments])}", flush=True)
    return subprocess.run([MESHFIRE, verb, "--mesh", MESH, *arguments], cwd=ROOT, check=False).returncode


def stop(mesh: subprocess.Popen[bytes]) -> None:
    mesh.send_signal(signal.SIGINT)
    try:
        mesh.wait(60)
        print("\nthe mesh has stopped", flush=True)
    except subprocess.TimeoutExpired:
        mesh.kill()
        mesh.wait()


if __name__ == "__main__":
    sys.exit(main())
