"""Alerts arrive: at a real web server, mail server and program; and one that fails or hangs hurts nobody."""

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal import cli
from shoal.alerting import read_alerts
from shoal.observe.alert_sinks import Command, Email, Post, Webhook, deliver, join_all, note_of
from shoal.observe.alerts import Alert
from shoal.spec.errors import UserError
from shoal.testing import rigs

ALERT = Alert(
    rule="nan", message="The loss is nan.", why="at step 3", hint="lower it", severity="error", rank=1, time=5.0
)
NOTE = note_of(ALERT, "my-run", "host")


@pytest.fixture
def web():
    """A web server: `got` is what was posted, `codes` what it answers first."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = server.codes.pop(0) if server.codes else 200
            if code == 200:
                server.got.append((self.path, json.loads(body)))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.got, server.codes = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/hooks/secret?token=secret"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def mail_server(context=None, tls="none"):
    """A mail server that wants a user and a password: `got` is what it was given, `ciphers` whether encrypted."""
    controllers = pytest.importorskip("aiosmtpd.controller")
    from aiosmtpd.smtp import AuthResult

    class Box:
        def __init__(self):
            self.got, self.ciphers = [], []

        async def handle_DATA(self, server, session, envelope):
            self.got.append(envelope)
            self.ciphers.append(server.transport.get_extra_info("cipher") is not None)
            return "250 OK"

    def check(server, session, envelope, mechanism, data):
        return AuthResult(success=(data.login, data.password) == (b"me", b"word"), handled=False)

    box = Box()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        box.port = found.getsockname()[1]
    options = {"authenticator": check, "auth_require_tls": tls == "starttls"}
    options |= {"ssl_context": context} if tls == "tls" else {}
    options |= {"tls_context": context, "require_starttls": True} if tls == "starttls" else {}
    controller = controllers.Controller(box, hostname="127.0.0.1", port=box.port, **options)
    controller.start()
    try:
        yield box
    finally:
        controller.stop()


@pytest.fixture
def mail():
    with mail_server() as box:
        yield box


def test_a_webhook_gets_what_slack_shows_and_what_programs_want(web):
    Webhook(url=web.url).send(NOTE)
    ((path, body),) = web.got
    assert path == "/hooks/secret?token=secret"
    assert body["text"] == "[error] my-run: The loss is nan.\nat step 3\nDo: lower it"
    assert (body["rule"], body["rank"], body["severity"], body["run"]) == ("nan", 1, "error", "my-run")


def test_a_secret_address_is_never_shown(web):
    web.codes.append(403)
    sink = Webhook(url=web.url)
    (result,) = deliver([sink], NOTE)
    assert result == ("webhook at 127.0.0.1", "it answered 403 Forbidden")
    assert "secret" not in repr(sink)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of aiosmtpd: a password without TLS
def test_an_email(mail):
    sink = Email(to=("you@example.org",), sender="me@example.org", host="127.0.0.1", port=mail.port, tls="none")
    hostile = note_of(Alert(rule="nan", message="x\r\nBcc: all@example.org", time=5.0), "run", "host")
    Email(**{**vars_of(sink), "user": "me", "password": "word"}).send(hostile)
    (envelope,) = mail.got
    assert envelope.rcpt_tos == ["you@example.org"]
    text = envelope.content.decode()
    assert "Subject: [warning] run: x" in text
    assert not any(line.startswith("Bcc:") for line in text.partition("\r\n\r\n")[0].splitlines())
    ((_, why),) = deliver([Email(**{**vars_of(sink), "user": "me", "password": "wrong"})], NOTE)
    assert "535" in why or "Authentication" in why
    ((_, why),) = deliver([Email(**{**vars_of(sink), "tls": "starttls"})], NOTE)
    assert "STARTTLS" in why
    assert "word" not in repr(Email(**{**vars_of(sink), "password": "word"}))


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A certificate for 127.0.0.1 that is trusted here: its files."""
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    return context


@rigs.needs("openssl")
@pytest.mark.parametrize("tls", ["starttls", "tls"])
def test_an_email_that_nobody_reads_on_its_way(certificate, monkeypatch, tls):
    with mail_server(certificate, tls) as box:
        sink = Email(
            to=("you@example.org",),
            sender="me@example.org",
            host="127.0.0.1",
            port=box.port,
            tls=tls,
            user="me",
            password="word",
        )
        assert deliver([sink], NOTE) == [(sink.name, "")]
        (envelope,) = box.got
        assert "The loss is nan." in envelope.content.decode()
        assert box.ciphers == [True], "the message came encrypted"
        # Whose certificate nobody knows gets neither the password nor the message.
        monkeypatch.delenv("SSL_CERT_FILE")
        ((_, why),) = deliver([sink], NOTE)
        assert "certificate verify failed" in why
        assert len(box.got) == 1


def vars_of(sink):
    return {name: getattr(sink, name) for name in sink.__slots__}


def command(tmp_path, code):
    return (sys.executable, "-c", code, str(tmp_path / "out"))


def test_a_command_gets_facts_and_no_shell(tmp_path):
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['SHOAL_ALERT_MESSAGE'] + sys.stdin.read())"
    note = note_of(Alert(rule="nan", message="$(touch x); `id`", rank=2, time=5.0), "run", "host")
    Command(command=command(tmp_path, code)).send(note)
    text = (tmp_path / "out").read_text()
    assert text.startswith("$(touch x); `id`{")
    assert json.loads(text[text.index("{") :])["rank"] == 2


def test_a_command_that_fails_hangs_or_is_not_there(tmp_path, monkeypatch):
    fails = Command(command=command(tmp_path, "import sys; sys.exit('no such luck')"))
    ((_, why),) = deliver([fails], NOTE)
    assert why == "it ended with 1: no such luck"
    ((_, why),) = deliver([Command(command=("/no/such/program",))], NOTE)
    assert "No such file" in why
    monkeypatch.setattr("shoal.observe.alert_sinks.PATIENCE_SECONDS", 0.5)
    ((_, why),) = deliver([Command(command=command(tmp_path, "import time; time.sleep(100)"))], NOTE)
    assert "longer than" in why


def test_a_post_tries_again(web):
    said = []
    web.codes[:] = [500, 500]
    post = Post(Webhook(url=web.url), said.append, tries=(0.0, 0.0, 0.0))
    post.offer(dict(NOTE))
    join_all([post], 30.0)
    assert len(web.got) == 1
    (text,) = said
    assert "alerts do not reach the webhook at 127.0.0.1: it answered 500" in text


def test_only_what_is_severe_enough_is_sent(web):
    post = Post(Webhook(url=web.url, min_severity="error"), print)
    post.offer({**NOTE, "severity": "warning"})
    post.offer(dict(NOTE))
    join_all([post], 30.0)
    assert len(web.got) == 1


def test_a_sink_that_hangs_keeps_nobody():
    said, stopped, hold = [], [], threading.Event()

    class Hanging:
        name, min_severity = "thing that hangs", "warning"

        def send(self, note):
            hold.wait(60)

        def stop(self):
            stopped.append(True)

    post = Post(Hanging(), said.append)
    for _ in range(1000):
        post.offer(dict(NOTE))
    join_all([post], 0.2)
    assert said == ["alerts do not reach the thing that hangs: it does not answer; `shoal alerts --test` tries it"]
    assert stopped
    hold.set()
    assert post.join(30.0)


def test_a_command_that_hangs_does_not_outlive_its_run(tmp_path):
    sink = Command(command=command(tmp_path, "import sys, time; open(sys.argv[1], 'w'); time.sleep(1000)"))
    post = Post(sink, print)
    post.offer(dict(NOTE))
    while not (tmp_path / "out").exists():
        assert post._thread.is_alive()
        time.sleep(0.01)
    join_all([post], 0.0)
    post._thread.join(60)
    assert not post._thread.is_alive()


def write(home, text):
    (home / "alerts.toml").write_text(text)
    return str(home / "alerts.toml")


def test_a_file_says_what_and_where(home, tmp_path):
    (tmp_path / "word").write_text("word\n")
    path = write(
        home,
        f"""
        no_progress = 60
        disk_low = "5GB"
        off = ["straggler"]
        [[to]]
        webhook = "https://hooks.example.org/secret"
        [[to]]
        email = ["a@example.org", "b@example.org"]
        smtp = "mail.example.org:587"
        user = "a"
        password_file = "{tmp_path}/word"
        min_severity = "error"
        [[to]]
        command = ["notify-send", "shoal"]
        """,
    )
    found = read_alerts(path, {"alert.no_progress": "90", "seed": "1", "alert.off": "nan,disk_low"})
    assert found.limits.no_progress == 90
    assert found.limits.disk_low == 5 << 30
    assert found.limits.off == {"nan", "disk_low"}
    assert [sink.name for sink in found.sinks] == [
        "webhook at hooks.example.org",
        "e-mail to a@example.org, b@example.org",
        "command notify-send",
    ]
    assert (found.sinks[1].tls, found.sinks[1].password, found.sinks[1].sender) == (
        "starttls",
        "word",
        "a@example.org",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_progress = ", "Cannot read"),
        ("no_progres = 5", "did you mean `no_progress`"),
        ("no_progress = -1", "no_progress is -1"),
        ("no_progress = true", "no_progress is True"),
        ('disk_low = "much"', "'much' is not a size"),
        ('off = ["nam"]', "did you mean `nan`"),
        ("to = 5", "is not a list of tables"),
        ("[[to]]", "nothing to send to"),
        ('[[to]]\nwebhook = "https://x"\ncommand = ["x"]', "webhook and command"),
        ('[[to]]\nwebhook = "file:///etc/passwd"', "not an address"),
        ('[[to]]\ncommand = "rm -rf"', "not a list of texts"),
        ('[[to]]\nemail = "nobody"', "no address"),
        ('[[to]]\nemail = "a@b"\nsmtp = "x"', "smtp is 'x'"),
        ('[[to]]\nemail = "a@b"\ntls = "x"', "tls is 'x'"),
        ('[[to]]\nemail = "a@b"\npassword_file = "/no/file"', "Cannot read the password"),
        ('[[to]]\nwebhook = "https://x"\nmin_severity = "bad"', "min_severity is 'bad'"),
        ('[[to]]\nwebhook = "https://x"\nuser = "me"', "setting of `webhook`"),
    ],
)
def test_mistakes_in_the_file(home, text, said, capsys):
    path = write(home, text)
    with pytest.raises(UserError) as caught:
        read_alerts(path, {})
    assert said in caught.value.render()
    assert caught.value.hint
    (home / "x.py").write_text("print(1)")
    assert cli.main(["run", str(home / "x.py")]) == 2
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("alert.no_progres=5", "did you mean `alert.no_progress`"),
        ("alert.off=x", "There is no rule"),
        ("alert.cool_down=x", "x"),
    ],
)
def test_mistakes_in_options(home, option, said, capsys):
    (home / "x.py").write_text("print(1)")
    assert cli.main(["run", "-o", option, str(home / "x.py")]) == 2
    assert said in capsys.readouterr().err


def test_a_trial(home, web, capsys):
    assert cli.main(["alerts", "--test"]) == 2
    assert "names no other place" in capsys.readouterr().err
    write(home, f'[[to]]\nwebhook = "{web.url}"\n[[to]]\ncommand = ["/no/such/program"]\n')
    assert cli.main(["alerts", "--test"]) == 1
    out = capsys.readouterr().out
    assert out == "sent    webhook at 127.0.0.1\nFAILED  command /no/such/program: No such file or directory\n"
    assert web.got[0][1]["rule"] == "trial"
    assert cli.main(["alerts", "--test", "--json"]) == 1
    assert [one["is_sent"] for one in json.loads(capsys.readouterr().out)] == [True, False]
    assert cli.main(["alerts"]) == 2
    assert cli.main(["alerts", "last", "--test"]) == 2
