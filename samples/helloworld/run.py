#!/usr/bin/env python3
"""Runs a small mesh on this machine: istiod, two Envoys, two versions of an application, and requests between them.

Started by `make run`. It needs no root and only Python's standard library. Everything listens on loopback addresses.
The mesh is a copy of this folder, so that its files can be edited while it runs. The output says where the copy is.
"""

import argparse
import collections
import contextlib
import ctypes
import fcntl
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
ENVOY = PROJECT / ".tools/py/bin/envoy"
TARGET = PROJECT / os.environ.get("CARGO_TARGET_DIR", "target")

HOST = "helloworld.hello.svc.cluster.local"
V1, V2, GATEWAY_IP = "127.0.0.17", "127.0.0.18", "127.0.0.20"

# All ports in the files of this folder, by use. A port that is in use on this machine is replaced in the copy.
PORTS = {
    "gateway": 18000,
    "admin of the sidecar": 18001,
    "admin of the gateway": 18002,
    "istiod xDS": 18010,
    "istiod http": 18011,
    "istiod monitoring": 18012,
    "sidecar inbound": 18070,
    "client": 18071,
    "helloworld": 18080,
    "helloworld pods": 18081,
    "weather": 18090,
    "weather outside": 18091,
}


class Failure(Exception):
    """A failed step, with a text for the user."""


def say(text):
    print(text, flush=True)


def step(number, text):
    say(f"\n[{number}/4] {text}")


def wait_for(what, condition, seconds=30):
    """Calls `condition` until its result is true. Returns the result and the seconds that passed."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        result = condition()
        if result:
            return result, time.monotonic() - begun
        time.sleep(0.02)
    raise Failure(f"timed out after {seconds} s: {what}")


@contextlib.contextmanager
def start_lock():
    """Serialises the start of several runs on this machine, from the choice of ports until all ports are bound.

    Envoy's listeners set SO_REUSEPORT. Two runs with the same port would therefore not fail, but receive each other's
    connections.
    """
    with open(pathlib.Path(tempfile.gettempdir()) / f"helloworld-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_free(port):
    with socket.socket() as probe:
        # With this option a closing connection does not block the port, but a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_ports():
    """Returns the port for each use: the one in the files, or another if that one is in use."""
    chosen, spare = {}, iter(range(19000, 20000))
    for use, port in PORTS.items():
        chosen[use] = port if is_free(port) else next(other for other in spare if is_free(other))
    return chosen


def copy_mesh(target, ports):
    """Copies the YAML files of this folder and replaces the ports."""
    replacements = {str(PORTS[use]): str(port) for use, port in ports.items()}
    for source in [*HERE.glob("*.yaml"), *HERE.glob("envoy/*.yaml")]:
        text = re.sub(r"\b\d{5}\b", lambda match: replacements.get(match[0], match[0]), source.read_text())
        copy = target / source.relative_to(HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)


def edit(path, change):
    """Changes a file atomically, as editors do: writes a new file and renames it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(change(path.read_text()))
    temporary.replace(path)


class Application(http.server.ThreadingHTTPServer):
    """An HTTP server. Its responses contain its name and the request headers."""

    daemon_threads = True

    def __init__(self, name, address):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Writes headers and body at once. Two writes would wait for a delayed TCP acknowledgement.
            wbufsize = -1

            def do_GET(self):
                headers = {key.lower(): value for key, value in self.headers.items()}
                body = json.dumps({"application": name, "headers": headers}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Disables the access log."""

        super().__init__(address, Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def get(address, path="/", host=HOST):
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", path, headers={"host": host})
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())
    finally:
        connection.close()


def is_ok(address, path, host="localhost"):
    try:
        return get(address, path, host)[0] == 200
    except OSError:
        return False


def count(address, path, host, times=100):
    """Sends requests. Returns the number of responses of each application, and of requests through the gateway."""
    responses, by_gateway = collections.Counter(), 0
    for _ in range(times):
        status, body, _ = get(address, path, host)
        if status != 200:
            responses[f"status {status}"] += 1
            continue
        body = json.loads(body)
        responses[body["application"]] += 1
        # A gateway adds this header; outbound listeners of a sidecar do not.
        by_gateway += "x-forwarded-for" in body["headers"]
    return responses, by_gateway


def table(rows):
    """Sends the requests of each row and prints a table of the responses."""
    titles = ("request", "sent to", "responses from", "through the gateway")
    cells = [titles]
    for request, (address, path, host) in rows.items():
        responses, by_gateway = count(address, path, host)
        applications = ", ".join(f"{name}: {number}" for name, number in sorted(responses.items()))
        through_gateway = f"{by_gateway} of {sum(responses.values())}"
        cells.append((request, f"{address[0]}:{address[1]}", applications, through_gateway))
        rows[request] = (responses, by_gateway)
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for number, row in enumerate(cells):
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        if number == 0:
            say("  " + "  ".join("-" * width for width in widths))
    return rows


def expect(condition, what):
    if not condition:
        raise Failure(f"unexpected result: {what}")


class Mesh:
    """The processes of the mesh. A context manager that ends them on exit."""

    def __init__(self, folder, ports, istiod):
        self.folder, self.ports, self.istiod = folder, ports, istiod
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Ends proxies first, so that they do not log the loss of the control plane.
        for _, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name, *command):
        log = (self.folder / f"{name}.log").open("wb")
        # In a session of its own the process does not receive Ctrl-C. The kernel ends it if this process dies.
        end_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
            cwd=self.folder,
        )
        self.processes.append((name, process))

    def local(self, use):
        return "127.0.0.1", self.ports[use]

    def wait_ready(self, name, use):
        def ready():
            for other, process in self.processes:
                if process.poll() is not None:
                    log = (self.folder / f"{other}.log").read_text(errors="replace")
                    raise Failure(f"{other} exited with status {process.returncode}:\n{log[-3000:]}")
            return is_ok(self.local(use), "/ready")

        return wait_for(f"{name} is ready", ready, 60)[1]

    def start_applications(self):
        pods = self.ports["helloworld pods"]
        Application("helloworld v1", (V1, pods))
        Application("helloworld v2", (V2, pods))
        Application("weather", ("127.0.0.2", self.ports["weather outside"]))
        Application("client", self.local("client"))

    def start_istiod(self):
        address = {use: f"127.0.0.1:{self.ports[use]}" for use in ("istiod xDS", "istiod http", "istiod monitoring")}
        self.start(
            "istiod",
            self.istiod,
            "discovery",
            "--registries=",
            "--configDir",
            self.folder / "mesh",
            f"--grpcAddr={address['istiod xDS']}",
            f"--httpAddr={address['istiod http']}",
            f"--monitoringAddr={address['istiod monitoring']}",
            "--secureGRPCAddr=",
            "--httpsAddr=",
            "--ctrlz_port=0",
        )
        return self.wait_ready("istiod", "istiod http")

    def start_envoy(self, name):
        config = self.folder / "mesh/envoy" / f"{name}.yaml"
        self.start(name, ENVOY, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning", "-c", config)
        return self.wait_ready(f"Envoy of the {name}", f"admin of the {name}")

    def rejected_updates(self, name):
        """Returns the number of xDS updates that an Envoy rejected."""
        _, body, _ = get(self.local(f"admin of the {name}"), "/stats?filter=update_rejected", "localhost")
        return sum(int(line.rsplit(" ", 1)[1]) for line in body.splitlines() if ": " in line)

    def endpoints(self, cluster):
        """Returns the endpoints of a cluster in the sidecar's Envoy."""
        _, body, _ = get(self.local("admin of the sidecar"), "/clusters?format=json", "localhost")
        sockets = [
            host["address"]["socket_address"]
            for status in json.loads(body)["cluster_statuses"]
            if status["name"] == cluster
            for host in status.get("host_statuses", [])
        ]
        return sorted(f"{socket['address']}:{socket['port_value']}" for socket in sockets)

    def route_updates(self):
        """Returns the number of route updates in the sidecar's Envoy."""
        path = r"/stats?filter=rds\..*config_reload$"
        _, body, _ = get(self.local("admin of the sidecar"), path, "localhost")
        return sum(int(line.rsplit(" ", 1)[1]) for line in body.splitlines())


def first_requests(mesh):
    say("Requests, 100 of each kind:")
    gateway = (GATEWAY_IP, mesh.ports["gateway"])
    rows = table(
        {
            "client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST),
            "gateway to helloworld, /hello": (gateway, "/hello", "hello.example.com"),
            "client's sidecar to weather.example.com": (mesh.local("weather"), "/", "weather.example.com"),
            "to the client through its sidecar": (mesh.local("sidecar inbound"), "/", "client"),
        }
    )
    status, _, headers = get(gateway, "/old", "hello.example.com")
    say(f"  The gateway redirects /old: status {status}, location {headers.get('location')}")
    responses, by_gateway = rows["client's sidecar to helloworld"]
    expect(responses["helloworld v1"] > 55 and responses["helloworld v2"] > 3, f"{responses} at weights 80 and 20")
    expect(by_gateway == 0, f"{by_gateway} requests through the gateway, although the network has none")
    responses, by_gateway = rows["gateway to helloworld, /hello"]
    expect(responses["helloworld v1"] > 25 and responses["helloworld v2"] > 25, f"{responses} at weights 50 and 50")
    expect(by_gateway == 100, f"{by_gateway} of 100 requests through the gateway")
    expect(rows["client's sidecar to weather.example.com"][0]["weather"] == 100, "failed requests to weather")
    expect(rows["to the client through its sidecar"][0]["client"] == 100, "failed requests to the client")
    expect(status == 302, f"status {status} for /old, not 302")


def change_weights(mesh):
    say("\nEdit of virtualservice.yaml: weights 80 and 20 become 20 and 80.")
    before = mesh.route_updates()
    swap = {"80  # v1": "20  # v1", "20  # v2": "80  # v2"}
    edit(
        mesh.folder / "mesh/virtualservice.yaml",
        lambda text: re.sub("|".join(map(re.escape, swap)), lambda match: swap[match[0]], text),
    )
    _, seconds = wait_for("new route in the sidecar", lambda: mesh.route_updates() > before)
    say(f"  The sidecar received the new route after {seconds * 1000:.0f} ms.")
    rows = table({"client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST)})
    responses, _ = rows["client's sidecar to helloworld"]
    expect(responses["helloworld v2"] > 55, f"{responses} at weights 20 and 80")


def add_network_gateway(mesh):
    port = mesh.ports["gateway"]
    cluster = f"outbound|{mesh.ports['helloworld']}||{HOST}"
    say(f"\nEdit of meshnetworks.yaml: the network \"cloud\" gets the gateway {GATEWAY_IP}:{port}.")
    say(f"  Endpoints of helloworld in the sidecar before: {', '.join(mesh.endpoints(cluster))}")
    gateway = f"    gateways: [{{address: {GATEWAY_IP}, port: {port}}}]\n"
    edit(mesh.folder / "mesh/meshnetworks.yaml", lambda text: text + gateway)
    expected = [f"{GATEWAY_IP}:{port}"]
    _, seconds = wait_for("gateway among the endpoints", lambda: mesh.endpoints(cluster) == expected)
    say(f"  Endpoints of helloworld in the sidecar after:  {', '.join(mesh.endpoints(cluster))} ({seconds * 1000:.0f} ms)")
    rows = table({"client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST)})
    responses, by_gateway = rows["client's sidecar to helloworld"]
    expect(responses["helloworld v1"] + responses["helloworld v2"] == 100, f"{responses}")
    expect(by_gateway == 100, f"{by_gateway} of 100 requests through the gateway")


def start(mesh):
    step(3, "Start the applications, istiod and two Envoys (seconds)")
    mesh.start_applications()
    say("Applications: helloworld v1, helloworld v2, weather, and a client.")
    say(f"istiod: ready after {mesh.start_istiod():.1f} s, configuration in {mesh.folder / 'mesh'}")
    for name in ("sidecar", "gateway"):
        seconds = mesh.start_envoy(name)
        expect(mesh.rejected_updates(name) == 0, f"the {name} rejected configuration; see {mesh.folder / name}.log")
        say(f"Envoy of the {name}: configured after {seconds:.1f} s, rejected nothing")


def show(mesh):
    step(4, "Send requests, and edit the configuration (seconds)")
    first_requests(mesh)
    change_weights(mesh)
    add_network_gateway(mesh)
    for name in ("sidecar", "gateway"):
        expect(mesh.rejected_updates(name) == 0, f"the {name} rejected configuration; see {mesh.folder / name}.log")


def keep_running(mesh):
    say(
        f"""
The mesh keeps running. To explore it:
  curl -H 'host: {HOST}' http://127.0.0.1:{mesh.ports['helloworld']}/
  curl http://127.0.0.1:{mesh.ports['admin of the sidecar']}/config_dump
  curl http://127.0.0.1:{mesh.ports['istiod monitoring']}/debug/syncz
  edit a file in {mesh.folder / 'mesh'}
Press Ctrl-C to end it."""
    )
    while all(process.poll() is None for _, process in mesh.processes):
        time.sleep(0.5)
    raise Failure("a process exited unexpectedly; see its log")


def release_binary():
    """Returns the binary of `make build` if no source is newer."""
    release = PROJECT / "out/istiod"
    sources = [*PROJECT.glob("src/**/*"), *PROJECT.glob("proto/**/*"), PROJECT / "Cargo.lock"]
    if release.exists() and all(source.stat().st_mtime <= release.stat().st_mtime for source in sources):
        return release
    return None


def compile_istiod():
    """Compiles istiod with the profile `quick` and without jemalloc, the fastest way. Cargo shows its progress."""
    binary = TARGET / "quick/istiod"
    if binary.exists():
        duration = "seconds, or about a minute if sources changed"
    else:
        duration = f"about 4 minutes on 2 cores the first time; this machine has {os.cpu_count()}"
    step(2, f"Compile istiod ({duration})")
    command = ["cargo", "build", "--locked", "--profile", "quick", "--no-default-features", "--bin", "istiod"]
    try:
        if subprocess.run(command, cwd=PROJECT).returncode != 0:
            raise Failure("istiod does not compile; see cargo's messages above")
    except FileNotFoundError:
        raise Failure("cargo is missing; install Rust: https://rustup.rs") from None
    return binary


@contextlib.contextmanager
def envoy_download():
    """Starts `make envoy` in the background. Yields a function that waits for its end."""
    step(1, "Fetch Envoy (37 MB the first time), in the background")
    process = subprocess.Popen(
        ["make", "--no-print-directory", "envoy"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def finish():
        output, _ = process.communicate()
        if process.returncode != 0:
            raise Failure(f"cannot fetch Envoy:\n{output}")

    try:
        yield finish
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def prepare(given):
    """Fetches Envoy, and compiles istiod at the same time unless a binary is given or up to date."""
    with envoy_download() as finish:
        binary = given or release_binary()
        if binary:
            step(2, f"Use the existing binary {binary}")
        else:
            binary = compile_istiod()
        finish()
    return binary.resolve()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="end after the last step")
    parser.add_argument("--istiod", type=pathlib.Path, help="binary to run; by default it is compiled")
    return parser.parse_args()


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    options = arguments()
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, interrupted)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="helloworld-"))
    keep = False
    try:
        istiod = prepare(options.istiod)
        with contextlib.ExitStack() as parts:
            with start_lock():
                ports = choose_ports()
                copy_mesh(folder / "mesh", ports)
                mesh = parts.enter_context(Mesh(folder, ports, istiod))
                start(mesh)
            status, _, _ = get(mesh.local("helloworld"))
            say(f"First routed request: status {status}, {time.monotonic() - begun:.0f} s after the start")
            show(mesh)
            if not options.once:
                keep_running(mesh)
        say("\nDone. All processes have ended.")
    except KeyboardInterrupt:
        say("\nEnded.")
    except (Failure, OSError) as failure:
        keep = any(folder.iterdir())
        say(f"\n{failure}" + (f"\nLogs and files: {folder}" if keep else ""))
        sys.exit(1)
    finally:
        if not keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
