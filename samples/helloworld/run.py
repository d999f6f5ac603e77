#!/usr/bin/env python3
"""A small mesh on this machine: istiod, two real Envoys, two versions of an application, and requests between them.

Started by `make run`. Needs no root and only Python's standard library; everything listens on loopback addresses.
The mesh is a copy of this folder, so that its files can be edited while it runs; the program says where the copy is.
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

HOST = "helloworld.hello.svc.cluster.local"
V1, V2, GATEWAY_IP = "127.0.0.17", "127.0.0.18", "127.0.0.20"

# Every port in the files of this folder, by what it is for. One that is taken on this machine is replaced in the copy.
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
    """What the reader should know when a step does not come about."""


def say(text):
    print(text, flush=True)


def eventually(what, condition, seconds=30):
    """Asks `condition` until it gives something; returns that and how long it took."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        found = condition()
        if found:
            return found, time.monotonic() - begun
        time.sleep(0.02)
    raise Failure(f"no sign of {what} within {seconds} s")


@contextlib.contextmanager
def starting():
    """Lets one run on this machine start at a time: from the choice of ports until all of them are listened on.

    Envoy shares its listeners' ports with whoever allows that, so that two runs that chose the same port would not fail
    but be dealt each other's connections.
    """
    with open(pathlib.Path(tempfile.gettempdir()) / f"helloworld-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_free(port):
    with socket.socket() as probe:
        # Connections that are still closing do not count; a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_ports():
    """The ports of the files where they are free, others where they are not."""
    chosen, spare = {}, iter(range(19000, 20000))
    for use, port in PORTS.items():
        chosen[use] = port if is_free(port) else next(other for other in spare if is_free(other))
    return chosen


def copy_mesh(target, ports):
    """Copies the folder's YAML files, with the ports that were chosen."""
    wanted = {str(PORTS[use]): str(port) for use, port in ports.items()}
    for source in [*HERE.glob("*.yaml"), *HERE.glob("envoy/*.yaml")]:
        text = re.sub(r"\b\d{5}\b", lambda found: wanted.get(found[0], found[0]), source.read_text())
        copy = target / source.relative_to(HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)


def edit(path, change):
    """Changes a file the way an editor does: the new text takes the place of the old one in one step."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(change(path.read_text()))
    draft.replace(path)


class Application(http.server.ThreadingHTTPServer):
    """Answers every request with its name and the headers that reached it."""

    daemon_threads = True

    def __init__(self, name, address):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # One write for headers and body: two would wait for the other side's delayed acknowledgement.
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
                """Requests are counted by those who send them."""

        super().__init__(address, Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def ask(address, path="/", host=HOST):
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", path, headers={"host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def reachable(address, path, host="localhost"):
    try:
        return ask(address, path, host)[0] == 200
    except OSError:
        return False


def count(address, path, host, times=100):
    """Sends requests and counts who answered them, and how many came by way of the gateway."""
    answered, by_gateway = collections.Counter(), 0
    for _ in range(times):
        status, body, _ = ask(address, path, host)
        if status != 200:
            answered[f"status {status}"] += 1
            continue
        body = json.loads(body)
        answered[body["application"]] += 1
        # A gateway notes where a request came from; a sidecar's outbound side does not.
        by_gateway += "x-forwarded-for" in body["headers"]
    return answered, by_gateway


def table(rows):
    """Prints what was routed where."""
    titles = ("request", "sent to", "answered by", "through the gateway")
    cells = [titles]
    for what, (address, path, host) in rows.items():
        answered, by_gateway = count(address, path, host)
        answers = ", ".join(f"{name}: {number}" for name, number in sorted(answered.items()))
        cells.append((what, f"{address[0]}:{address[1]}", answers, f"{by_gateway} of {sum(answered.values())}"))
        rows[what] = (answered, by_gateway)
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for number, row in enumerate(cells):
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        if number == 0:
            say("  " + "  ".join("-" * width for width in widths))
    return rows


def expect(condition, what):
    if not condition:
        raise Failure(f"unexpected: {what}")


class Mesh:
    """The running parts. Used as a context: leaving it ends every process that was started."""

    def __init__(self, folder, ports, istiod):
        self.folder, self.ports, self.istiod = folder, ports, istiod
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Proxies first, so that none of them sees its control plane go.
        for _, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name, *command):
        log = (self.folder / f"{name}.log").open("wb")
        # A process of its own session does not see the Ctrl-C that is meant for this one, and is ended with it.
        end_with_us = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_us,
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
                    raise Failure(f"{other} ended with status {process.returncode}:\n{log[-3000:]}")
            return reachable(self.local(use), "/ready")

        return eventually(f"a ready {name}", ready, 60)[1]

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

    def refusals(self, name):
        _, body, _ = ask(self.local(f"admin of the {name}"), "/stats?filter=update_rejected", "localhost")
        return sum(int(line.rsplit(" ", 1)[1]) for line in body.splitlines() if ": " in line)

    def endpoints(self, cluster):
        """The endpoints that the sidecar's Envoy has for a cluster."""
        _, body, _ = ask(self.local("admin of the sidecar"), "/clusters?format=json", "localhost")
        sockets = [
            host["address"]["socket_address"]
            for status in json.loads(body)["cluster_statuses"]
            if status["name"] == cluster
            for host in status.get("host_statuses", [])
        ]
        return sorted(f"{socket['address']}:{socket['port_value']}" for socket in sockets)

    def routes_loaded(self):
        """How often the sidecar's Envoy has loaded routes."""
        path = r"/stats?filter=rds\..*config_reload$"
        _, body, _ = ask(self.local("admin of the sidecar"), path, "localhost")
        return sum(int(line.rsplit(" ", 1)[1]) for line in body.splitlines())


def first_requests(mesh):
    say("\nRequests, a hundred of each kind:")
    gateway = (GATEWAY_IP, mesh.ports["gateway"])
    rows = table(
        {
            "client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST),
            "gateway to helloworld, /hello": (gateway, "/hello", "hello.example.com"),
            "client's sidecar to weather.example.com": (mesh.local("weather"), "/", "weather.example.com"),
            "to the client, through its sidecar": (mesh.local("sidecar inbound"), "/", "client"),
        }
    )
    status, _, headers = ask(gateway, "/old", "hello.example.com")
    say(f"  The gateway answers /old with a redirect: {status} to {headers.get('location')}")
    answered, by_gateway = rows["client's sidecar to helloworld"]
    expect(answered["helloworld v1"] > 55 and answered["helloworld v2"] > 3, f"{answered} at weights 80 and 20")
    expect(by_gateway == 0, "the endpoints are reached directly as long as their network has no gateway")
    answered, by_gateway = rows["gateway to helloworld, /hello"]
    expect(answered["helloworld v1"] > 25 and answered["helloworld v2"] > 25, f"{answered} at weights 50 and 50")
    expect(by_gateway == 100, "the gateway notes where requests came from")
    expect(rows["client's sidecar to weather.example.com"][0]["weather"] == 100, "weather answers")
    expect(rows["to the client, through its sidecar"][0]["client"] == 100, "the client answers")
    expect(status == 302, f"/old is redirected, not answered with {status}")


def change_weights(mesh):
    say("\nEdit of virtualservice.yaml: weights 20 and 80 instead of 80 and 20.")
    before = mesh.routes_loaded()
    swap = {"80  # v1": "20  # v1", "20  # v2": "80  # v2"}
    edit(
        mesh.folder / "mesh/virtualservice.yaml",
        lambda text: re.sub("|".join(map(re.escape, swap)), lambda found: swap[found[0]], text),
    )
    _, seconds = eventually("the new route in the sidecar", lambda: mesh.routes_loaded() > before)
    say(f"  The sidecar had the new route after {seconds * 1000:.0f} ms.")
    rows = table({"client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST)})
    answered, _ = rows["client's sidecar to helloworld"]
    expect(answered["helloworld v2"] > 55, f"{answered} at weights 20 and 80")


def name_a_network_gateway(mesh):
    port = mesh.ports["gateway"]
    cluster = f"outbound|{mesh.ports['helloworld']}||{HOST}"
    say(f"\nEdit of meshnetworks.yaml: the network \"cloud\" is entered through the gateway {GATEWAY_IP}:{port}.")
    say(f"  The sidecar's endpoints of helloworld before: {', '.join(mesh.endpoints(cluster))}")
    gateway = f"    gateways: [{{address: {GATEWAY_IP}, port: {port}}}]\n"
    edit(mesh.folder / "mesh/meshnetworks.yaml", lambda text: text + gateway)
    wanted = [f"{GATEWAY_IP}:{port}"]
    _, seconds = eventually("the gateway among the endpoints", lambda: mesh.endpoints(cluster) == wanted)
    say(f"  The sidecar's endpoints of helloworld after:  {', '.join(mesh.endpoints(cluster))} ({seconds * 1000:.0f} ms)")
    rows = table({"client's sidecar to helloworld": (mesh.local("helloworld"), "/", HOST)})
    answered, by_gateway = rows["client's sidecar to helloworld"]
    expect(answered["helloworld v1"] + answered["helloworld v2"] == 100, f"{answered}")
    expect(by_gateway == 100, f"{by_gateway} of 100 requests came through the gateway")


def start(mesh):
    mesh.start_applications()
    say("Applications: helloworld v1, helloworld v2, weather, and a client.")
    say(f"istiod: ready after {mesh.start_istiod():.1f} s, serving {mesh.folder / 'mesh'}")
    for name in ("sidecar", "gateway"):
        seconds = mesh.start_envoy(name)
        expect(mesh.refusals(name) == 0, f"the {name} refused configuration; see {mesh.folder / name}.log")
        say(f"Envoy of the {name}: configured after {seconds:.1f} s, refused nothing")


def show(mesh):
    first_requests(mesh)
    change_weights(mesh)
    name_a_network_gateway(mesh)
    for name in ("sidecar", "gateway"):
        expect(mesh.refusals(name) == 0, f"the {name} refused configuration; see {mesh.folder / name}.log")


def stay(mesh):
    say(
        f"""
All of it keeps running. To look around:
  curl -H 'host: {HOST}' http://127.0.0.1:{mesh.ports['helloworld']}/
  curl http://127.0.0.1:{mesh.ports['admin of the sidecar']}/config_dump
  curl http://127.0.0.1:{mesh.ports['istiod monitoring']}/debug/syncz
  edit a file in {mesh.folder / 'mesh'}
Ctrl-C ends it."""
    )
    while all(process.poll() is None for _, process in mesh.processes):
        time.sleep(0.5)
    raise Failure("a process ended by itself; its log tells why: " + str(mesh.folder))


def binary():
    """The release binary if `make build` made one since the last change, else a development build."""
    release = PROJECT / "out/istiod"
    sources = [*PROJECT.glob("src/**/*"), *PROJECT.glob("proto/**/*"), PROJECT / "Cargo.lock"]
    if release.exists() and all(source.stat().st_mtime <= release.stat().st_mtime for source in sources):
        return release
    say("Building istiod (the first time takes some minutes) ...")
    build = subprocess.run(["cargo", "build", "--locked", "--bin", "istiod"], cwd=PROJECT)
    if build.returncode != 0:
        raise Failure("istiod does not build")
    return PROJECT / "target/debug/istiod"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="end when everything has been shown")
    parser.add_argument("--istiod", type=pathlib.Path, help="binary to run; without it one is built")
    return parser.parse_args()


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    options = arguments()
    signal.signal(signal.SIGTERM, interrupted)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="helloworld-"))
    keep = False
    try:
        if not ENVOY.exists() and subprocess.run(["make", "tools"], cwd=PROJECT).returncode != 0:
            raise Failure("Envoy cannot be installed; `make tools` says why")
        istiod = (options.istiod or binary()).resolve()
        with contextlib.ExitStack() as parts:
            with starting():
                ports = choose_ports()
                copy_mesh(folder / "mesh", ports)
                mesh = parts.enter_context(Mesh(folder, ports, istiod))
                start(mesh)
            show(mesh)
            if not options.once:
                stay(mesh)
        say("\nShown; everything has been ended.")
    except KeyboardInterrupt:
        say("\nEnded.")
    except (Failure, OSError) as failure:
        keep = True
        say(f"\n{failure}\nLogs and files stay in {folder}")
        sys.exit(1)
    finally:
        if not keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
