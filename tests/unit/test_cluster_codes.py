"""Join codes: what is typed, what it stands for, and who may come in with it."""

import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.certificates import as_der, make_authority, make_request, sign_request
from shoal.cluster.codes import Code, fingerprint_of, is_proof, make_code, parse_code, prove
from shoal.cluster.invitations import (
    OPEN_SECONDS,
    check_open,
    find_invitation,
    invite,
    open_until,
    read_invitations,
    use,
)
from shoal.spec.errors import UserError

HEAD = b"the certificate of a head"


@given(st.binary(min_size=1))
def test_a_code_is_read_as_it_was_made(certificate):
    code = make_code(certificate)
    assert parse_code(str(code)) == code
    assert code.fingerprint == fingerprint_of(certificate)


def test_a_code_is_short_and_has_groups():
    groups = str(make_code(HEAD)).split("-")
    assert [len(group) for group in groups] == [5, 5, 5, 5]


def test_a_code_may_be_typed_carelessly():
    code = Code("0123", "ABCDEFGHJKMNPQ1")
    typed = str(code).lower().replace("-", " ").replace("0", "o", 1).replace("1", "l", 1)
    assert parse_code(f"  {typed} ") == code


def is_told(slip: str) -> bool:
    try:
        parse_code(slip)
    except UserError as error:
        return "mistake" in error.message
    return False


def test_nearly_every_slip_of_the_finger_is_told():
    text = str(make_code(HEAD))
    slips = [text[:at] + letter + text[at + 1 :] for at in range(len(text)) for letter in "7KZ" if text[at] != "-"]
    slips = [slip for slip in slips if slip != text]
    assert sum(map(is_told, slips)) >= 0.85 * len(slips)


@pytest.mark.parametrize(
    "text", ["", "ABCDE", "ABCDE-FGHJK-MNPQR-STVW", "ABCDE-FGHJK-MNPQR-STVW!", "x" * 500, "é" * 20]
)
def test_what_is_no_code_is_refused(text):
    with pytest.raises(UserError, match="not a join code"):
        parse_code(text)


def test_secrets_are_never_the_same():
    assert len({make_code(HEAD).secret for _ in range(200)}) == 200


def test_a_proof_holds_for_nothing_else():
    proof = prove("SECRET", b"asked", HEAD, b"text")
    assert is_proof(proof, "SECRET", b"asked", HEAD, b"text")
    for secret, *parts in (
        ("OTHER", b"asked", HEAD, b"text"),
        ("SECRET", b"asked", b"another certificate", b"text"),
        ("SECRET", b"answered", HEAD, b"text"),
        ("SECRET", b"asked", HEAD + b"t", b"ext"),
    ):
        assert not is_proof(proof, secret, *parts)
    for nonsense in (None, 7, "", "é", ["x"]):
        assert not is_proof(nonsense, "SECRET", b"asked", HEAD, b"text")


def test_an_invitation_lets_each_machine_in_once(tmp_path):
    folder = str(tmp_path / "cluster")
    code = invite(folder, HEAD, now=1000.0)
    use(folder, code.secret, "10.0.0.2", now=1001.0)
    use(folder, code.secret, "10.0.0.3", now=1002.0)
    with pytest.raises(UserError, match="used already") as refused:
        use(folder, code.secret, "10.0.0.2", now=1003.0)
    assert "--invite" in refused.value.hint
    assert read_invitations(folder)[0].used_by == ("10.0.0.2", "10.0.0.3")


def test_an_invitation_expires(tmp_path):
    folder = str(tmp_path / "cluster")
    code = invite(folder, HEAD, now=1000.0)
    assert open_until(folder) == 1000.0 + OPEN_SECONDS
    check_open(read_invitations(folder)[0], "10.0.0.2", 1000.0 + OPEN_SECONDS - 1)
    with pytest.raises(UserError, match="expired"):
        use(folder, code.secret, "10.0.0.2", now=1000.0 + OPEN_SECONDS)


def test_codes_before_stay_good_and_old_ones_are_forgotten(tmp_path):
    folder = str(tmp_path / "cluster")
    old, first = invite(folder, HEAD, now=0.0), invite(folder, HEAD, now=90000.0)
    second = invite(folder, HEAD, now=90010.0)
    assert [each.secret for each in read_invitations(folder)] == [first.secret, second.secret]
    with pytest.raises(UserError, match="not good any more"):
        use(folder, old.secret, "10.0.0.2", now=90011.0)


def test_an_invitation_is_found_by_what_its_bearer_can_prove(tmp_path):
    folder = str(tmp_path / "cluster")
    code, _ = invite(folder, HEAD), invite(folder, HEAD)
    invitations = read_invitations(folder)
    found = find_invitation(invitations, prove(code.secret, HEAD), HEAD)
    assert found is not None
    assert found.secret == code.secret
    assert find_invitation(invitations, prove("GUESS", HEAD), HEAD) is None


def test_invitations_are_for_the_owners_eyes_only(tmp_path):
    folder = tmp_path / "cluster"
    invite(str(folder), HEAD)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "invitations.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["", "{", "[1]", json.dumps([{"secret": "x"}])])
def test_damaged_invitations_invite_nobody(tmp_path, damage):
    (tmp_path / "invitations.json").write_text(damage)
    assert read_invitations(str(tmp_path)) == []
    assert open_until(str(tmp_path)) == 0.0


def test_a_certificate_is_good_for_the_address_it_was_asked_from():
    from cryptography import x509

    ca, ca_key = make_authority()
    _, request = make_request("10.9.9.9, really")
    certificate = x509.load_pem_x509_certificate(sign_request(request, "10.0.0.2", ca, ca_key))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.2", "127.0.0.1"]
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    assert "really" not in certificate.subject.rfc4514_string()


def test_a_certificate_signs_no_others():
    from cryptography import x509

    ca, ca_key = make_authority()
    _, request = make_request("node")
    certificate = x509.load_pem_x509_certificate(sign_request(request, "10.0.0.2", ca, ca_key))
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


@pytest.mark.parametrize("request_text", [b"", b"nonsense", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"])
def test_a_request_that_is_none_is_refused(request_text):
    ca, ca_key = make_authority()
    with pytest.raises(UserError, match="not one of ours"):
        sign_request(request_text, "10.0.0.2", ca, ca_key)


def test_certificates_of_two_heads_have_fingerprints_of_their_own():
    assert len({fingerprint_of(as_der(make_authority()[0])) for _ in range(5)}) == 5
