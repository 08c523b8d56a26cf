"""A Hugging Face Hub on loopback: what `huggingface_hub` asks of one, and ways of going wrong."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

COMMIT = "c0ffee" + "0" * 34
_IN_GIT = ".json", ".txt", ".jinja"  # small files: not in LFS
_API = re.compile(
    r"/api/(?:models|(datasets))/([^/]+/[^/]+)(?:/(revision|tree|auth-check))?(?:/(.*))?"
)
_FILE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class FakeHub:
    """Repositories by name, such as `ORG/REPO` and `datasets/ORG/REPO`: bytes by file name."""

    def __init__(self, repositories):
        self.repositories = repositories
        self.gated = set()  # repositories that nobody may read
        self.cut = {}  # by file name: after how many bytes its download ends, whoever asks
        self.damaged = set()  # file names whose last byte arrives wrong
        self.broken = False  # every answer is an error of the server
        self.asked = []  # method, path and Range of every request
        self.sent = []  # body of every request that has one
        self.blobs = {}  # uploaded large files, by SHA-256
        self.closed = False  # nobody may write

    def downloads(self):
        """Files whose bytes were asked for, and from which byte on."""
        return [
            (path.rpartition("/")[2], int(start[6:].partition("-")[0]) if start else 0)
            for method, path, start in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    @contextlib.contextmanager
    def serving(self):
        """The address, for as long as the block lasts."""
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.hub = self
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join(timeout=10)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_PUT(self):
        self.server.hub.blobs[self.path.rpartition("/")[2]] = self._read()
        self._send(200, b"")

    def do_POST(self):
        """Uploads: https://huggingface.co/docs/hub/api, and Git LFS' batch interface."""
        hub, body = self.server.hub, self._read()
        path = urllib.parse.urlsplit(self.path).path
        address = f"http://127.0.0.1:{self.server.server_port}"
        if hub.closed or hub.broken:
            return self._send(503 if hub.broken else 401, b'{"error": "no"}')
        said = {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repositories.setdefault(name, {})
            said = {"url": f"{address}/{name}"}
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = ["regular" if f.endswith((*_IN_GIT, ".md")) else "lfs" for f in files]
            ways = zip(files, modes, strict=True)
            rows = [{"path": f, "uploadMode": mode, "shouldIgnore": False} for f, mode in ways]
            said = {"files": rows}
        elif path.endswith("/objects/batch"):
            upload = [
                one | {"actions": {"upload": {"href": f"{address}/blob/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            said = {"transfer": "basic", "objects": upload}
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                file, files = line["value"], hub.repositories[match[1]]
                if line["key"] == "file":
                    files[file["path"]] = base64.b64decode(file["content"])
                elif line["key"] == "lfsFile":
                    files[file["path"]] = hub.blobs[file["oid"]]
            said = {"commitOid": COMMIT, "commitUrl": f"{address}/{match[1]}/commit/{COMMIT}"}
        self._send(200, json.dumps(said).encode())

    def _read(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.hub.sent.append(body)
        self.server.hub.asked.append((self.command, self.path, None))
        return body

    def _answer(self):
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        self.server.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.server.hub.broken:
            self._send(503, b"{}")
        elif match := _API.fullmatch(path):
            self._describe(f"{'datasets/' if match[1] else ''}{match[2]}", match[3], match[4])
        elif match := _FILE.fullmatch(path):
            self._resolve(*match.groups())
        else:
            self._send(404, b"{}")

    def _send(self, status, body, **headers):
        self.send_response(status)
        headers = {"Content_Length": len(body)} | headers
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, repository, revision):
        """Answers for what is not there or not open; returns whether it did."""
        hub = self.server.hub
        if repository not in hub.repositories:
            self._send(401, b"{}", X_Error_Code="RepoNotFound")
        elif revision not in (None, "main", "v1", COMMIT):
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
        else:
            return False
        return True

    def _describe(self, repository, what, revision):
        hub = self.server.hub
        if self._refuse(repository, revision):
            return
        files = hub.repositories[repository]
        if what == "auth-check":
            gated = repository in hub.gated
            self._send(
                403 if gated else 200, b"{}", **{"X_Error_Code": "GatedRepo"} if gated else {}
            )
            return
        entries = []
        for name, data in files.items():
            sha256, oid = hashlib.sha256(data).hexdigest(), hashlib.sha1(data).hexdigest()
            lfs = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 134}
            entry = {"size": len(data)} | ({} if name.endswith(_IN_GIT) else {"lfs": lfs})
            if what == "tree":
                entries.append(entry | {"type": "file", "oid": oid, "path": name})
            else:
                entries.append(entry | {"rfilename": name, "blobId": oid})
        gated = "manual" if repository in hub.gated else False
        info = {"id": repository, "sha": COMMIT, "siblings": entries, "gated": gated}
        self._send(200, json.dumps(entries if what == "tree" else info).encode())

    def _resolve(self, repository, revision, file):
        hub = self.server.hub
        if self._refuse(repository, revision):
            return
        if repository in hub.gated:
            self._send(403, b"", X_Error_Code="GatedRepo")
            return
        data = hub.repositories[repository].get(file)
        if data is None:
            self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        kind = hashlib.sha1 if file.endswith(_IN_GIT) else hashlib.sha256
        headers = {"ETag": f'"{kind(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
        if file in hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-")[6:].partition("-")
        start, stop = int(first), int(last or len(data) - 1) + 1
        if asked:
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        end = min(hub.cut.get(file, stop), stop) if self.command == "GET" else stop
        headers["Content_Length"] = stop - start
        self._send(206 if asked else 200, data[start : max(start, end)], **headers)
        self.close_connection = end < stop
