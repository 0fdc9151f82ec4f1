"""A stand-in for the Hugging Face Hub on this machine: models are created, uploaded and downloaded over HTTP, without a network.

It speaks as much of the Hub's interface as `huggingface_hub` needs for one model repository with one branch: who am I, create,
pre-upload (which files go through LFS), LFS upload, commit, listing, download. Xet, the Hub's newer storage, is not spoken, so
clients run with HF_HUB_DISABLE_XET=1; `hub_env` and `point_at` see to that.

    with Hub() as hub:
        subprocess.run([sys.executable, "script.py"], env=hub_env(hub), check=True)
        assert hub.files["someone/name"]["config.json"] == Path("model/config.json").read_bytes()
"""

import base64
import codecs
import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

TOKEN = "hf_dummy"
LFS_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf", ".npz", ".npy", ".model", ".zip", ".gz"}
LFS_SIZE = 10 * 2**20  # bytes; the Hub takes no larger file outside LFS
REASONS = {401: "Invalid username or password.", 403: "You have no write access", 500: "Internal Error."}


class Refused(Exception):
    """An answer other than success: HTTP status, message and, where the client looks for one, the Hub's X-Error-Code."""

    def __init__(self, status, message, code=None, **more):
        super().__init__(message)
        self.status, self.body = status, {"error": message, **more}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Hub:
    """The server, from `with Hub() as hub:` or `Hub().start()` until the end of the block or `close()`.

    What a test reads:
        url       http://127.0.0.1:<port>
        files     {repo_id: {path: bytes}}, what has been committed; a test may also put a model here for others to download
        created   repository ids, in the order in which they were created
        asked     {repo_id: what the client sent to create it}, e.g. `visibility`
        messages  [(repo_id, summary line of a commit)]
        lfs       {sha256: bytes}, what came through LFS, committed or not
        requests  [(method, path)], without the query
        home      an empty folder, the clients' HF_HOME

    What a test sets:
        private_user  the account that every token belongs to
        fail_on       None, "whoami", "create", "upload" (the PUT of an LFS file) or "commit": refused with `fail_status`
        fail_status   403 at once; 401; or 500, which huggingface_hub tries again for 23 seconds when it uploads
    """

    def __init__(self, private_user="someone", fail_on=None, fail_status=403):
        self.private_user, self.fail_on, self.fail_status = private_user, fail_on, fail_status
        self.files, self.created, self.asked, self.messages, self.lfs, self.requests = {}, [], {}, [], {}, []
        self.lock = threading.RLock()  # one request at a time

    def start(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hub_home_")
        self.home = Path(self.folder.name)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True)
        self.thread.start()
        return self

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self.folder.cleanup()

    def __enter__(self):
        return self.start()

    def __exit__(self, *error):
        self.close()

    def revision(self, repo_id):
        """The commit id of a repository: a hash of its files, so it changes with every change."""
        listing = [(path, hashlib.sha256(content).hexdigest()) for path, content in sorted(self.files[repo_id].items())]
        return hashlib.sha1(json.dumps([repo_id, listing]).encode()).hexdigest()

    # ---- what each request does: arguments are the groups of its route, and the body; returns (status, headers, body) --------

    def whoami(self, body):
        self.fail("whoami")
        return {"type": "user", "id": "0", "name": self.private_user, "fullname": self.private_user, "orgs": [], "auth": {}}

    def create(self, body):
        self.fail("create")
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or self.private_user}/{asked['name']}"
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.files:
            raise Refused(409, "You already created this model repo", **answer)
        self.files[repo_id], self.asked[repo_id] = {}, asked
        self.created.append(repo_id)
        return answer

    def validate(self, body):
        return {"errors": [], "warnings": []}

    def preupload(self, repo_id, revision, body):
        held, answer = self.at(repo_id, revision), []
        for file in json.loads(body)["files"]:
            mode = "lfs" if is_lfs(file["path"], file["size"], base64.b64decode(file["sample"])) else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if file["path"] in held:
                answer[-1]["oid"] = oid(file["path"], held[file["path"]])
        return {"files": answer}

    def batch(self, repo_id, body):
        self.at(repo_id)
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(body)["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self.lfs:
                upload = {"href": f"{self.url}/lfs/{wanted['oid']}", "header": {}}
                wanted["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs/verify", "header": {}}}
        return {"transfer": "basic", "objects": objects}

    def upload(self, sha256, body):
        self.fail("upload")
        if hashlib.sha256(body).hexdigest() != sha256:
            raise Refused(400, "Content does not match its sha256")
        self.lfs[sha256] = body
        return {}

    def verify(self, body):
        asked = json.loads(body)
        if len(self.lfs.get(asked["oid"], b"")) != asked["size"]:
            raise Refused(400, "Not uploaded, or of another size")
        return {}

    def commit(self, repo_id, revision, body):
        """All of a commit's changes, or none."""
        self.fail("commit")
        after, summary = dict(self.at(repo_id, revision)), ""
        for line in body.splitlines():
            key, value = (change := json.loads(line))["key"], change["value"]
            if key == "header":
                summary = value["summary"]
            elif key == "file":
                after[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.lfs:
                    raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                after[value["path"]] = self.lfs[value["oid"]]
            elif key in ("deletedFile", "deletedFolder"):
                gone = [path for path in after if path == value["path"] or path.startswith(value["path"].rstrip("/") + "/")]
                if not gone:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                after = {path: content for path, content in after.items() if path not in gone}
            else:
                raise Refused(400, f"{key} is not known here")
        self.files[repo_id] = after
        self.messages.append((repo_id, summary))
        head = self.revision(repo_id)
        return {"success": True, "commitOid": head, "commitUrl": f"{self.url}/{repo_id}/commit/{head}"}

    def info(self, repo_id, revision, body):
        held = self.at(repo_id, revision)
        about = {"_id": "0", "id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0], "sha": self.revision(repo_id)}
        about |= {"private": self.asked.get(repo_id, {}).get("visibility") == "private", "gated": False, "disabled": False}
        about |= {"tags": [], "downloads": 0, "likes": 0, "lastModified": "2024-01-01T00:00:00.000Z"}
        return about | {"siblings": [{"rfilename": path} for path in sorted(held)]}

    def tree(self, repo_id, revision, folder, body):
        """Always the whole tree below the folder; the clients that matter here ask for it, or filter what they get."""
        held, folder = self.at(repo_id, revision), unquote(folder or "").rstrip("/")
        inside = {path: content for path, content in sorted(held.items()) if not folder or path.startswith(folder + "/")}
        if folder and not inside:
            raise Refused(404, f'"{folder}" does not exist on "main"', "EntryNotFound")
        answer = [{"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for p, c in inside.items()]
        for entry in answer:
            content = inside[entry["path"]]
            if is_lfs(entry["path"], len(content), content[:512]):
                entry["lfs"] = {"oid": oid(entry["path"], content), "size": len(content), "pointerSize": 134}
        return answer

    def resolve(self, repo_id, revision, path, body):
        held, path = self.at(repo_id, revision), unquote(path)
        headers = {"X-Repo-Commit": self.revision(repo_id)}
        if path not in held:
            refusal = Refused(404, "Entry not found", "EntryNotFound")
            refusal.headers |= headers
            raise refusal
        return held[path], headers | {"ETag": f'"{oid(path, held[path])}"'}

    # ---- shared by the above -----------------------------------------------------------------------------------------------

    def fail(self, step):
        if self.fail_on == step:
            raise Refused(self.fail_status, REASONS.get(self.fail_status, "Refused."))

    def at(self, repo_id, revision="main"):
        """The files of a repository; refuses, as the Hub does, unknown ids and anything but main or its latest commit."""
        if repo_id not in self.files:
            raise Refused(404, "Repository not found", "RepoNotFound")
        if revision not in (None, "main", self.revision(repo_id)):
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.files[repo_id]

    def answer(self, method, path, token, body):
        """(status, headers, bytes) for a request."""
        self.requests.append((method, path))
        try:
            for methods, pattern, needs_token, function in ROUTES:
                if method in methods.split() and (found := re.fullmatch(pattern, path)):
                    if needs_token and not token:
                        raise Refused(401, REASONS[401])
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
        return status, headers | {"Content-Length": str(len(content)), "X-Request-Id": str(len(self.requests))}, content


REPO, REVISION = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES = [  # methods, path, whether a token is required, what answers
    ("GET", "/api/whoami-v2", True, Hub.whoami),
    ("POST", "/api/repos/create", True, Hub.create),
    ("POST", "/api/validate-yaml", False, Hub.validate),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", True, Hub.preupload),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", True, Hub.batch),
    ("PUT", "/lfs/([0-9a-f]{64})", False, Hub.upload),  # the address is the permission
    ("POST", "/lfs/verify", False, Hub.verify),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", True, Hub.commit),
    ("GET", f"/api/models/{REPO}(?:/revision/{REVISION})?", False, Hub.info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/(.+))?", False, Hub.tree),
    ("GET HEAD", f"/{REPO}/resolve/{REVISION}/(.+)", False, Hub.resolve),
]


class Handler(BaseHTTPRequestHandler):
    """Reads a request whole, lets `hub` answer it, and closes the connection."""

    protocol_version = "HTTP/1.1"  # a body of unknown length comes in chunks
    wbufsize = -1  # headers and body leave together
    hub = None

    def do_GET(self):
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        body = self.read_chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
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


def is_lfs(path, size, sample):
    """Whether a file is kept in LFS: by its name, by its size, or as it is no text."""
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(sample)  # incremental, as the sample may end within a character
        return PurePosixPath(path).suffix in LFS_SUFFIXES or size > LFS_SIZE or b"\0" in sample
    return True


def oid(path, content):
    """What the Hub identifies a file's content by: SHA-256 of an LFS file, else git's hash of a blob."""
    if is_lfs(path, len(content), content[:512]):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def settings(hub):
    """The environment variables that lead huggingface_hub to the server; None: to be unset."""
    unset = "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HUGGINGFACE_CO_STAGING HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_TOKEN_PATH"
    unset += " HF_HUB_DISABLE_IMPLICIT_TOKEN HUGGING_FACE_HUB_TOKEN HF_OIDC_RESOURCE HF_ASSETS_CACHE TRANSFORMERS_CACHE"
    proxies = {name: None for name in os.environ if name.lower() in ("http_proxy", "all_proxy")}
    switches = {f"HF_HUB_DISABLE_{what}": "1" for what in ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")}
    places = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(hub.home)}
    return dict.fromkeys(unset.split()) | proxies | switches | places


def hub_env(hub, **more):
    """The environment of a subprocess that is to talk to the server: this process's, its way to the Hub replaced."""
    return {name: value for name, value in (dict(os.environ) | settings(hub) | more).items() if value is not None}


def point_at(monkeypatch, hub):
    """Leads this process to the server until the end of the test, although huggingface_hub read its environment long ago.

    New `HfApi()` objects, the functions of huggingface_hub (they belong to one such object, made at import) and transformers'
    from_pretrained and push_to_hub follow; an `HfApi` object made before does not.
    """
    import huggingface_hub.hf_api
    import transformers.utils.hub
    from huggingface_hub import close_session, constants

    for name, value in settings(hub).items():  # HF_TOKEN is read from here each time; the rest is for subprocesses
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    token = hub.home / "token"
    values = dict(
        ENDPOINT=hub.url,
        HUGGINGFACE_CO_URL_TEMPLATE=hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        HF_URL_HOSTS=frozenset({"127.0.0.1"}),
        HF_HOME=str(hub.home),
        HF_HUB_CACHE=str(hub.home / "hub"),
        HF_TOKEN_PATH=str(token),
        HF_STORED_TOKENS_PATH=str(token.with_name("stored_tokens")),
        HF_HUB_OFFLINE=False,
        HF_HUB_DISABLE_XET=True,
        HF_HUB_DISABLE_IMPLICIT_TOKEN=False,
        HF_HUB_DISABLE_TELEMETRY=True,
    )
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value, raising=name != "HF_URL_HOSTS")  # older versions have no HF_URL_HOSTS
    api = huggingface_hub.hf_api.api
    monkeypatch.setattr(api, "endpoint", hub.url)
    if hasattr(api, "_whoami_cache"):
        monkeypatch.setattr(api, "_whoami_cache", {})
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # made once, at the first use
    close_session()  # an open one has read the proxies
