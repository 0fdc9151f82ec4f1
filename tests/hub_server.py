"""A stand-in for the Hugging Face Hub on this machine, over HTTP and without a network.

It speaks as much of the Hub's interface as `huggingface_hub` needs for model repositories. It has no large files (LFS):
all of them come in the commit. It does not speak Xet, so `point_at` turns that off.

    with Hub() as hub:
        point_at(monkeypatch, hub)
        model.push_to_hub("name")
        assert "config.json" in hub.files["someone/name"]
"""

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

USER, TOKEN = "someone", "hf_dummy"  # Every token belongs to this account.


class Refused(Exception):
    """An answer other than success: HTTP status, message and, where the client looks for one, an X-Error-Code."""

    def __init__(self, status, message, code=None, **more):
        super().__init__(message)
        self.status, self.body = status, {"error": message, **more}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Hub:
    """The server, within `with Hub() as hub:`.

    A test reads: url; files, {repository or "repository@branch": {path: bytes}}; created, the repositories in the
    order of their creation; requests, [(method, path)]. It may put a model into `files`.
    A test sets: fail_on, None, "create" or "commit", which is then refused.
    """

    def __init__(self):
        self.fail_on, self.files, self.created, self.requests = None, {}, [], []
        self.lock = threading.RLock()  # one request at a time

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hub_home_")
        self.home = Path(self.folder.name)  # the clients' HF_HOME
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self.folder.cleanup()

    # ---- what each request does: arguments are the groups of its route, and the body; returns what is answered -------
    def whoami(self, body):
        return {"type": "user", "id": "0", "name": USER, "fullname": USER, "orgs": [], "auth": {}}

    def create(self, body):
        self.fail("create")
        asked = json.loads(body)
        repository = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.url}/{repository}", "name": repository, "id": repository}
        if repository in self.files:
            raise Refused(409, "You already created this model repo", **answer)
        self.files[repository] = {}
        self.created.append(repository)
        return answer

    def validate(self, body):
        return {"errors": [], "warnings": []}

    def preupload(self, repository, revision, body):
        """How each file is to be sent."""
        self.at(repository, revision)
        how = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": file["path"]} | how for file in json.loads(body)["files"]]}

    def commit(self, repository, revision, body):
        """All of a commit's changes, or none."""
        self.fail("commit")
        after = dict(self.at(repository, revision))
        for line in body.splitlines():
            key, value = (change := json.loads(line))["key"], change["value"]
            if key == "file":
                after[value["path"]] = base64.b64decode(value["content"])
            elif key != "header":
                raise Refused(400, f"{key} is not known here")
        self.files[repository] = after
        head = self.revision(repository)
        return {"success": True, "commitOid": head, "commitUrl": f"{self.url}/{repository}/commit/{head}"}

    def info(self, repository, revision, body):
        name = self.branch(repository, revision)
        siblings = [{"rfilename": path} for path in sorted(self.files[name])]
        about = {"_id": "0", "id": repository, "modelId": repository, "author": repository.split("/")[0], "tags": []}
        about |= {"sha": self.revision(name), "private": False, "gated": False, "disabled": False, "likes": 0}
        return about | {"downloads": 0, "lastModified": "2024-01-01T00:00:00.000Z", "siblings": siblings}

    def tree(self, repository, revision, folder, body):
        """The whole tree below a folder."""
        held, folder = self.at(repository, revision), unquote(folder or "").rstrip("/")
        inside = {path: x for path, x in sorted(held.items()) if not folder or path.startswith(folder + "/")}
        if folder and not inside:
            raise Refused(404, f'"{folder}" does not exist on "main"', "EntryNotFound")
        return [{"type": "file", "path": path, "size": len(x), "oid": object_id(x)} for path, x in inside.items()]

    def resolve(self, repository, revision, path, body):
        """Download of a file."""
        held, path = self.at(repository, unquote(revision)), unquote(path)
        headers = {"X-Repo-Commit": self.revision(self.branch(repository, unquote(revision)))}
        if path not in held:
            refusal = Refused(404, "Entry not found", "EntryNotFound")
            refusal.headers |= headers
            raise refusal
        return held[path], headers | {"ETag": f'"{object_id(held[path])}"'}

    # ---- shared by the above -----------------------------------------------------------------------------------------
    def revision(self, repository):
        """The commit id of a repository: a hash of its files, so it changes with every change."""
        files = sorted(self.files[repository].items())
        listing = [(path, hashlib.sha256(content).hexdigest()) for path, content in files]
        return hashlib.sha1(json.dumps([repository, listing]).encode()).hexdigest()

    def fail(self, step):
        if self.fail_on == step:
            raise Refused(403, "You have no write access")

    def branch(self, repository, revision="main"):
        """The key in `files` of a branch or of its latest commit. Other repositories and revisions are refused."""
        if repository not in self.files:
            raise Refused(404, "Repository not found", "RepoNotFound")
        for name in self.files:
            found, _, branch = name.partition("@")
            if found == repository and (revision or "main") in (branch or "main", self.revision(name)):
                return name
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def at(self, repository, revision="main"):
        """The files of a branch of a repository."""
        return self.files[self.branch(repository, revision)]

    def answer(self, method, path, token, body):
        """(status, headers, bytes) for a request."""
        self.requests.append((method, path))
        try:
            for methods, pattern, needs_token, function in ROUTES:
                if method in methods.split() and (found := re.fullmatch(pattern, path)):
                    if needs_token and not token:
                        raise Refused(401, "Invalid username or password.")
                    answer = function(self, *found.groups(), body)
                    content, headers = answer if isinstance(answer, tuple) else (answer, {})
                    break
            else:
                raise Refused(404, f"Not served here: {method} {path}")
            status = 200
        except Refused as refusal:
            status, headers, content = refusal.status, refusal.headers, refusal.body
        if not isinstance(content, bytes):
            headers, content = headers | {"Content-Type": "application/json"}, json.dumps(content).encode()
        return status, headers | {"Content-Length": str(len(content)), "X-Request-Id": "0"}, content


REPO, REVISION = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES = [  # methods, path, whether a token is required, what answers
    ("GET", "/api/whoami-v2", True, Hub.whoami),
    ("POST", "/api/repos/create", True, Hub.create),
    ("POST", "/api/validate-yaml", False, Hub.validate),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", True, Hub.preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", True, Hub.commit),
    ("GET", f"/api/models/{REPO}(?:/revision/{REVISION})?", False, Hub.info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/(.+))?", False, Hub.tree),
    ("GET HEAD", f"/{REPO}/resolve/{REVISION}/(.+)", False, Hub.resolve),
]


class Handler(BaseHTTPRequestHandler):
    """Reads a request whole, lets `hub` answer it, and closes the connection."""

    protocol_version = "HTTP/1.1"  # A body of unknown length comes in chunks.
    wbufsize = -1  # Headers and body leave together.
    hub = None

    def do_GET(self):
        is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        body = self.read_chunks() if is_chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.hub.lock:
            status, headers, content = self.hub.answer(self.command, urlsplit(self.path).path, token, body)
        self.send_response(status)
        for name, value in (headers | {"Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET

    def read_chunks(self):
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *args):
        """Says nothing: `Hub.requests` has it."""


def object_id(content):
    """What the Hub identifies a file's content by: git's hash of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def point_at(monkeypatch, hub):
    """Leads this process to the server until the end of the test. huggingface_hub has read its environment long ago.

    New `HfApi()` objects, the functions of huggingface_hub, and transformers' from_pretrained follow.
    """
    import huggingface_hub.hf_api
    import transformers.utils.hub
    from huggingface_hub import close_session, constants

    for name in [name for name in os.environ if name.lower() in ("http_proxy", "all_proxy")]:
        monkeypatch.delenv(name)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # It is read from here each time.
    values = dict(
        ENDPOINT=hub.url,
        HUGGINGFACE_CO_URL_TEMPLATE=hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        HF_URL_HOSTS=frozenset({"127.0.0.1"}),
        HF_HOME=str(hub.home),
        HF_HUB_CACHE=str(hub.home / "hub"),
        HF_TOKEN_PATH=str(hub.home / "token"),
        HF_STORED_TOKENS_PATH=str(hub.home / "stored_tokens"),
        HF_HUB_OFFLINE=False,
        HF_HUB_DISABLE_XET=True,
        HF_HUB_DISABLE_IMPLICIT_TOKEN=False,
        HF_HUB_DISABLE_TELEMETRY=True,
    )
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value, raising=name != "HF_URL_HOSTS")  # Older versions have none.
    api = huggingface_hub.hf_api.api
    monkeypatch.setattr(api, "endpoint", hub.url)
    if hasattr(api, "_whoami_cache"):
        monkeypatch.setattr(api, "_whoami_cache", {})
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # It is made once, at the first use.
    close_session()  # An open one has read the proxies.
