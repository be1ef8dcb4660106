"""Credentials in what leaves a run: model cards, reports, trackers, the record of the command line.

A credential is hidden where its name says so (``api_key``, ``--apiKey X``, a header), where its form does
(``hf_...``, a JWT, a private key), and in URLs. Names of models, digests and revisions of repositories stay.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not published)"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    r"(.*(pass_?(word|wd|phrase)|secret|credential|authorization|cookie|signature|bearer)"
    r"|.*(api|access|account|auth|private|encryption|signing|ssh|master|wandb|swanlab)_?key"
    r"|(.*_)?(pwd?|auth|headers?|sig|sas|jwt|pat|dsn)|(db|user|smtp|proxy|login)_?pass)(s|_id|_value)*"
)
"""Names, as words in lower case, below which everything is hidden."""
_TOKEN = re.compile(r"(.*token|(.*_)?key)s?(_value)?")
"""Names below which texts are hidden; numbers of tokens are not."""
_ORDINARY = re.compile(
    r"(.*_)?(pad|eos|bos|unk|sep|cls|mask|stop|start|end|image|special|added|think)_tokens?"
    r"|(.*_)?(prompt|question|input|output|answer|response|solution|label|chosen|rejected|messages?|text"
    r"|column|source|truth|tools?|images?|system|reward|score|weight|data|info|margin|sort|group|fn)_keys?"
)
"""Tokens of a vocabulary, and keys that name columns."""
_CONSTANT = re.compile(r"(true|false|null|none)?", re.IGNORECASE)
_NUMBER_OR_SPECIAL = re.compile(r"[-+\d._e]+|[<\[].*[>\]]|\$\{.*")
_FORM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)"
    r"|\beyJ[\w=-]{6,}(?:\.[\w=-]*){1,4}"
    r"|\b(?:hf|api_org|npm|r8|gsk|nvapi|pplx|[sr]k|dckr_pat)[_-](?=[\w-]{0,99}[\dA-Z])[\w-]{10,}"
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|xox\w-|xapp-|AKIA|ASIA|AIza|GOCSPX-|ya29\.|SG\.|pypi-|wandb_v1_"
    r"|xai-|tvly-|whsec_|hv[bs]\.|dop_v1_|shp(?:at|ca|pa|ss)_|lin_api_|glsa_|sbp_|PMAK-|AGE-SECRET-KEY-"
    r"|dapi(?=[0-9a-f]{32}))[\w.-]{10,}"
    r"|(?<=//hooks\.slack\.com/)[^\s\"']+|(?<=/bot)\d{5,}:[\w-]+",
    re.DOTALL,
)
_HEX = re.compile(
    r"((?:revision|commit|sha1?|hash|digest|snapshots|resolve|tree|blob|raw)\W{1,4}|@)?\b[0-9a-f]{40}\b", re.I
)
"""A key of W&B, or a commit: the word in front of it tells which."""
_REVISION = re.compile(r".*(revision|commit|sha|hash|digest)")
_USER = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,20})://((?P<login>[^\s/?#:@]{0,300})|[^\s/?#]{0,300}|[^\s/:@]{0,300}:(?!\d+/)[^\s@]{0,300})@",
    re.IGNORECASE,
)
_USER_OF_HOST = re.compile(
    r"(?<![\w/:.])[\w.+-]{1,100}:[^\s/:@'\",]{1,300}@(?=[\w-]{1,99}[.:]\w|localhost\b)"
)
_PLACES = re.compile(r"abfss?|wasbs?|ssh|git\+ssh|sftp|hdfs")
"""Schemes of ``container@account``, and of logins without a password."""
_QUERY = re.compile(r"(\w://[^\s?\"']{0,2000}\?)[^\s\"']+")
"""Signatures have many names."""
_WEB = re.compile(r"https?://[^\s\"'?#]+", re.IGNORECASE)
_IDS = re.compile(r"runs|experiments|resolve|tree|blob|raw|commit|snapshots")
"""What stands in front of an identifier in a path."""
_PAIR = re.compile(
    r"(?<![\w.])(?P<name>[a-z_][\w.-]{0,99})(?P<quote>[\"']?)\]?[^\S\n]{0,9}(?P<sign>=(?!=)>?|:(?!//))[^\S\n]{0,9}",
    re.IGNORECASE,
)
_FLAG = re.compile(
    r"(?<!\S)--?(?P<name>[a-z][\w.-]{0,99})(?P<quote>)(?P<sign>\s)\s{0,9}(?=[^\s-])", re.IGNORECASE
)
_LOGIN = re.compile(
    r"(?<!\S)(-u|--user|--proxy-user)([ =]{1,9})(?!\d+:\d+(?!\S))['\"]?[^\s:'\"]{1,100}:[^\s'\"]+['\"]?"
)
"""User and password of curl, wget and others; a user and group in numbers is docker's."""
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\{[^}]*\}|\[[^\]]*\]"
_WORD = re.compile(rf"{_QUOTED}|[^\s,;&\"'}}\])]+")
_LINE = re.compile(rf"{_QUOTED}|[^\n,\"'}}\]]{{1,4000}}")
"""A value after ``=`` or a flag, and after a colon, as in headers."""
_SCHEME = re.compile(r"\b(Bearer|Basic|Digest|Negotiate) +[\w.+/=~-]{6,}", re.IGNORECASE)


def redacted(value: Any, name: str = "") -> Any:
    """Return plain values without credentials; ``name`` is the key of ``value``.

    A list may be a command line: the word after ``--api-key`` is hidden.
    """
    if isinstance(value, Mapping):
        above = name if _is_hidden(name, "x") else ""
        entry = value.get("name")  # of an environment: {name: API_KEY, value: ...}
        if isinstance(entry, str) and "value" in value and _is_hidden(entry, value["value"]):
            value = {**value, "value": HIDDEN}
        return {
            redacted_text(key) if isinstance(key, str) else key: redacted(item, above or str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        logins = (_LOGIN.fullmatch(f"{flag} {item}") for flag, item in itertools.pairwise(["", *value]))
        value = [HIDDEN if login else item for login, item in zip(logins, value, strict=True)]
        flags = [re.fullmatch(r"--?([a-zA-Z][\w.-]*)", str(item)) for item in value]
        above = [name, *(flag[1] if flag else name for flag in flags)]
        return [
            redacted(item, name if flag else key)
            for item, flag, key in zip(value, flags, above, strict=False)
        ]
    if _is_hidden(name, value):
        return HIDDEN
    if not isinstance(value, str) or (_REVISION.fullmatch(_words(name)) and _HEX.fullmatch(value)):
        return value
    whole = re.fullmatch(r"([-+~]*(?P<name>[\w.-]+)=)(?P<value>.*)", value, re.DOTALL)
    if whole and _SECRET.fullmatch(_words(whole["name"])) and _is_hidden(whole["name"], whole["value"]):
        return whole[1] + HIDDEN  # a password with blanks
    return redacted_text(_QUERY.sub(rf"\1{HIDDEN}", value))


def redacted_text(text: str) -> str:
    """Return a text without what looks like a credential; the queries of URLs stay."""
    text = _without_named(_FLAG, _without_named(_PAIR, text))
    text = _SCHEME.sub(rf"\1 {HIDDEN}", _FORM.sub(HIDDEN, text))
    text = _LOGIN.sub(rf"\1\2{HIDDEN}", text)
    text = _USER_OF_HOST.sub(f"{HIDDEN}@", _USER.sub(_without_user, text))
    text = _WEB.sub(_without_segments, text)
    return _HEX.sub(lambda found: found[0] if found[1] else HIDDEN, text)


def _is_hidden(name: str, value: Any) -> bool:
    words = _words(name)
    if value is None or isinstance(value, bool) or _CONSTANT.fullmatch(str(value).strip()):
        return False
    if _SECRET.fullmatch(words):
        return True
    is_text = isinstance(value, str) and not _NUMBER_OR_SPECIAL.fullmatch(value.strip("\"' "))
    return is_text and bool(_TOKEN.fullmatch(words)) and not _ORDINARY.fullmatch(words)


def _words(name: str) -> str:
    return "_".join(_WORDS.findall(name.rpartition(".")[2])).lower()


def _without_named(pattern: re.Pattern[str], text: str) -> str:
    """Hide the values behind the names of credentials that ``pattern`` finds."""
    parts, start = [], 0
    for found in pattern.finditer(text):
        if found.start() < start or not _is_hidden(found["name"], "x"):
            continue
        value = (_LINE if found["sign"] == ":" else _WORD).match(text, found.end())
        if value is None or not _is_hidden(found["name"], value[0]) or _is_prose(found, value[0]):
            continue
        parts += text[start : value.start()], HIDDEN
        start = value.end()
    return "".join([*parts, text[start:]])


def _is_prose(found: re.Match[str], value: str) -> bool:
    """Return True for words after a colon, as in "Answer key: a letter"."""
    if found["sign"] != ":" or found["quote"] or _SECRET.fullmatch(_words(found["name"])):
        return False
    return not re.search(r"\d|.{20}", value.split(maxsplit=1)[0])


def _without_user(found: re.Match[str]) -> str:
    is_a_place = found["login"] and _PLACES.fullmatch(found[1].lower())
    return found[0] if is_a_place else f"{found[1]}://{HIDDEN}@"


def _without_segments(url: re.Match[str]) -> str:
    parts = url[0].split("/")
    hidden = (HIDDEN if _is_random(above, own) else own for above, own in itertools.pairwise(parts))
    return "/".join([parts[0], *hidden])


def _is_random(above: str, own: str) -> bool:
    """Return True for a part of a path below the name of a credential, or of random letters and digits."""
    if len(own) < 8 or not re.fullmatch(r"[\w~%-]+", own) or _IDS.fullmatch(above):
        return False
    if re.search(r"\d", own) and _is_hidden(above, own):
        return True
    runs = re.findall(r"[A-Za-z0-9]{16,}", own)
    return any(len(re.findall(r"\d+|[a-z]+|[A-Z]+", run)) > 5 for run in runs)
