"""A stand-in for the Hugging Face Hub, as far as huggingface_hub asks it: on this machine, in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".mp4", ".png")  # goes through LFS, as the Hub's .gitattributes say


class Repo:
    """One branch, of which only the last commit is kept."""

    def __init__(self, private: bool):
        self.private = private
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []  # their messages

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files.items()))).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """Knows one user, `me`, whose token is TOKEN."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Each route is a method: its name, and the pattern of the path in its docstring."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        is_me = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for pattern, route, needs_token in ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                if needs_token and not is_me:
                    return self._answer(401, {"error": "Invalid username or password."})
                repo = match.groupdict().get("repo")
                known = self.server.repos.get(repo or "")
                if repo and (known is None or (known.private and not is_me)):
                    return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
                return route(self, body, known, **match.groupdict())
        return self._answer(404, {"error": f"no such route: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *args: Any) -> None:
        """Quietly."""

    def create(self, body: bytes, _: Any) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "me":
            return self._answer(403, {"error": f"You may not create a model under {asked['organization']}"})
        status = 409 if name in self.server.repos else 200
        self.server.repos.setdefault(name, Repo(asked.get("visibility") == "private"))
        return self._answer(status, {"url": f"{self.server.url}/{name}"})

    def validate(self, body: bytes, _: Any) -> None:
        text = json.loads(body)["content"]
        self._answer(200 if text.startswith("---\n") else 400, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, _: Any, repo: str) -> None:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._answer(200, {"files": files})

    def batch(self, body: bytes, _: Any, repo: str) -> None:
        def upload(asked: dict[str, Any]) -> dict[str, Any]:
            return asked | {"actions": {"upload": {"href": f"{self.server.url}/blobs/{asked['oid']}"}}}

        self._answer(200, {"transfer": "basic", "objects": [upload(asked) for asked in json.loads(body)["objects"]]})

    def store(self, body: bytes, _: Any, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.blobs[oid] = body
        self._answer(200)

    def commit(self, body: bytes, known: Repo, repo: str) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                known.commits.append(value["summary"])
            elif line["key"] == "file":
                known.files[value["path"]] = base64.b64decode(value["content"])
            else:
                known.files[value["path"]] = self.server.blobs[value["oid"]]
        url = f"{self.server.url}/{repo}/commit/{known.sha}"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": known.sha})

    def info(self, body: bytes, known: Repo, repo: str) -> None:
        siblings = [{"rfilename": path} for path in known.files]
        self._answer(200, {"id": repo, "sha": known.sha, "private": known.private, "siblings": siblings})

    def resolve(self, body: bytes, known: Repo, repo: str, sha: str, path: str) -> None:
        if sha != known.sha or path not in known.files:
            return self._answer(404, X_Error_Code="EntryNotFound")
        etag = hashlib.sha256(known.files[path]).hexdigest()
        return self._answer(200, known.files[path], X_Repo_Commit=known.sha, ETag=f'"{etag}"')


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Callable[..., None], bool]] = [  # request, method, whether it needs a token
    ("POST /api/repos/create", Handler.create, True),
    ("POST /api/validate-yaml", Handler.validate, False),
    (f"POST /api/models/{REPO}/preupload/main", Handler.preupload, True),
    (rf"POST /{REPO}\.git/info/lfs/objects/batch", Handler.batch, True),
    (r"PUT /blobs/(?P<oid>\w+)", Handler.store, False),
    (f"POST /api/models/{REPO}/commit/main", Handler.commit, True),
    (f"GET /api/models/{REPO}", Handler.info, False),
    (rf"(?:GET|HEAD) /{REPO}/resolve/(?P<sha>\w+)/(?P<path>.+)", Handler.resolve, False),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
