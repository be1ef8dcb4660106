"""Credentials by name, by form and in URLs, and ordinary configurations, which stay as they are."""

import pytest
import yaml

from strop.config.trees import TREES
from strop.redaction import HIDDEN, redacted, redacted_text

S = "Zq7LmW2xTr9KbV4nYc8H"  # no test may find it in what is published
HEX = "3f9a1c7be2d84f60a5b91c3d7e8f20416a5b3c2d"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n{S}==\n-----END RSA PRIVATE KEY-----"

KINDS = {
    "camel case names": [{"apiKey": S}, {"accessToken": S}, {"clientSecret": S}, {"dbPassword": S}],
    "other spellings of names": [{"APIKey": S}, {"x-api-key": S}, {"apikey": S}, {"HF_TOKENS": [S]}],
    "lists and dicts below a hidden name": [
        {"api_keys": [S, S]},
        {"password": {"value": S, "of": {"user": S}}},
        {"tokens": {"main": [S]}},
        {"credentials": [{"id": S}]},
    ],
    "numbers below a hidden name": [
        {"password": 83261947},
        {"db_pwd": [83261947]},
        {"auth": {"pin": 83261947}},
        {"secrets": {"a": 83261947}},
    ],
    "--api-key X": [
        ["strop", "train", "--api-key", S],
        ["strop", "train", "--apiKey", S],
        {"command": f"serve --api_key '{S}' --port 80"},
        ["serve", "-token", S, "--port", "80"],
    ],
    "--api-key=X": [
        ["strop", "train", f"--api-key={S}"],
        ["strop", "train", f"++reward_model.kwargs.apiKey={S} {S}"],
        {"command": f'serve --API_KEY="{S}, {S}"'},
        ["train", f"kwargs={{api_key: {S}, n: 4}}"],
    ],
    "JWT": [
        {"name": JWT},
        {"url": f"https://host/x?a=1&jot={JWT}"},
        [f"x={JWT}"],
        {"text": f"send {JWT} there"},
    ],
    "AIza": [
        {"name": f"AIzaSyD{S}aBcDeFgH123"},
        [f"x=AIzaSyD{S}aBcDeFgH123"],
        {"url": f"https://maps.net/v1/AIzaSyD{S}aBcDeFgH123/x"},
        {"text": f'say "AIzaSyD{S}aBcDeFgH123".'},
    ],
    "PEM": [
        {"name": PEM},
        {"name": PEM.replace("\n", "\\n")},
        {"name": PEM.replace("\n", " ").replace("RSA ", "")},
        {"text": f"first {PEM.replace('RSA', 'OPENSSH').rpartition('-----END')[0]}"},
    ],
    "40 hex": [{"name": HEX}, {"name": HEX.upper()}, [f"WANDB={HEX}"], {"text": f"wandb login {HEX} first"}],
    "sig=": [
        {"url": f"https://account.blob.core.windows.net/c/f?sp=r&sig={S}%2B"},
        {"url": f"https://s3.net/f?X-Amz-Signature={S}&X-Amz-Credential={S}"},
        ["strop", f"sig={S}"],
        {"text": f"signed with sig={S}&sp=r"},
    ],
    "tokens in a path": [
        {"url": f"https://hooks.slack.com/services/T0000/B0000/{S}"},
        {"url": f"https://api.telegram.org/bot123456789:{S}/sendMessage"},
        {"url": f"https://host.net/files/{S}/rows.jsonl"},
        {"path": f"/mnt/hf_{S}/rows.jsonl"},
    ],
    "user:password in a URL": [
        {"url": f"postgres://ada:{S}@db.net:5432/x"},
        {"url": f"redis://:{S}@cache:6379/0"},
        {"url": f"https://ada:p@{S}@host/x?y=ada:{S}/{S}@z"},
        [f"proxy=ada:{S}@proxy.net:3128"],
    ],
    "a token as the user of a URL": [
        {"url": f"https://{S}@github.com/a/b"},
        {"url": f"git+https://oauth2:{S}@gitlab.net/a"},
        [f"clone https://{S}:x-oauth-basic@github.com/a/b"],
        {"url": f"s3://{S}:{S}@bucket/x"},
    ],
    "cookies": [
        {"cookie": S},
        {"Set-Cookie": f"id={S}; Path=/"},
        {"cookies": {"session": S}},
        ["curl", "-H", f"Cookie: a=1; session={S}"],
    ],
    "headers": [
        {"headers": {"X-Custom": S}},
        {"extraHeaders": [f"X-Custom: {S}"]},
        ["curl", "--header", f"X-Custom: {S}"],
        {"text": f"Authorization: Token {S}"},
    ],
    "schemes of HTTP": [
        {"value": f"Bearer {S}"},
        {"value": f"bearer {S}"},
        {"value": f"Basic {S}=="},
        {"text": f"sent 'Authorization': 'Digest {S}'"},
    ],
    "JSON in a text": [
        {"kwargs": f'{{"apiKey": "{S}"}}'},
        {"kwargs": f"{{'n': 1, 'password': '{S}'}}"},
        {"kwargs": f'{{"a": {{"token": "{S}"}}}}'},
        [f'reward.kwargs={{"headers": {{"X": "{S}"}}}}'],
    ],
    "entries of an environment": [
        {"env": [{"name": "API_KEY", "value": S}]},
        {"env": [{"name": "PLAIN", "value": "x"}, {"name": "dbPassword", "value": S}]},
        {"name": "HF_TOKEN", "value": S},
        {"env": [{"value": 83261947, "name": "SECRET"}]},
    ],
    "a login after -u": [
        ["curl", "-u", f"ada:{S}", "https://host/x"],
        {"command": f"curl --user ada:{S} https://host/x"},
        {"command": f"curl -u 'ada:{S}' https://host/x"},
        ["curl", f"--proxy-user=ada:{S}"],
    ],
    "forms of services": [
        {"name": f"hf_{S}"},
        {"name": f"sk-proj-{S}"},
        {"name": f"github_pat_{S}"},
        {"name": f"AKIA{S}"},
    ],
    "forms of more services": [
        {"name": f"xai-{S}"},
        ["curl", f"https://host/x/hvs.{S}"],
        {"text": f"use whsec_{S} there"},
        {"name": f"dapi{HEX[:32]}"},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_spelling_of_a_credential_is_left(kind):
    assert len(KINDS[kind]) == 4
    for value in KINDS[kind]:
        found = str(redacted(value))
        assert HIDDEN in found, value
        for secret in (S, HEX[:32], HEX.upper(), JWT[-20:], "83261947", "eyJ"):
            assert secret not in found, (value, found)


ORDINARY = {
    "data": {
        "max_prompt_length": 512,
        "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
        "prompt_key": "prompt",
        "answer_key": "answer",
        "tools_key": "tools",
        "train_files": [
            "/data/tokens/train.parquet",
            "s3://bucket/tokens/3f9a1c7be2d84f60a5b91c3d7e8f2041/part-00001.parquet",
            "openai/gsm8k@3f9a1c7be2d84f60a5b91c3d7e8f20416a5b3c2d:train",
            f"https://huggingface.co/datasets/a/b/resolve/{HEX}/train-00000-of-00001.parquet",
            f"~/.cache/huggingface/hub/models--a--b/snapshots/{HEX}/model.safetensors",
            "abfss://container@account.dfs.core.windows.net/rows.parquet",
            "hdfs://namenode:8020/user/ada/rows.parquet",
            "https://host.net:8080/DeepSeek-R1-Distill-Qwen-7B-v2-2024/rows@main/x.jsonl",
        ],
    },
    "model": {
        "path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "revision": HEX,
        "commit_sha": HEX,
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "lora_adapter_path": "/home/ada/hf_checkpoints_v/sk-learn-text-classification",
    },
    "layers": {0: 0.5, 12: 0.25},
    "optim": {"lr": 1e-6, "betas": [0.9, 0.95], "eps": "1e-8", "name": "adamw:fused"},
    "rollout": {
        "max_num_batched_tokens": 8192,
        "stop_token_ids": [151643, 151645],
        "ppo_max_token_len_per_gpu": "${actor.ppo_max_token_len_per_gpu}",
        "tokens_per_second": 83261947,
        "use_auth_token": True,
        "hf_token": None,
    },
    "reward": {
        "function": "my_rewards:score",
        "digest": "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab",
        "prompt": "Answer key: the letter. Note the token: a word. Is 3:4 = 6:8? Use x=3, y = 4.",
        "stop_tokens": ["</s>"],
        "url": "http://127.0.0.1:8000/v1",
    },
    "trainer": {
        "run_id": "0123456789abcdef0123456789abcdef",
        "default_local_dir": "~/runs/qwen2.5_grpo_2026-11-25_19-38-37",
        "tracker": "http://mlflow.net:5000/#/experiments/1/runs/0123456789abcdef0123456789abcdef",
        "wandb": "https://wandb.ai/ada/project/runs/x8k2m4q9z1",
    },
    "command": [
        "strop",
        "train",
        "--config",
        "a.yaml",
        "max_tokens=512",
        "--out=token",
        "-u",
        "1000:1000",
        "data.prompt_key=prompt",
    ],
}


def test_an_ordinary_configuration_is_unchanged():
    assert redacted(ORDINARY) == ORDINARY
    text = yaml.safe_dump(ORDINARY, width=1000)
    assert redacted_text(text) == text


@pytest.mark.parametrize("command", TREES)
def test_no_default_is_hidden(command):
    defaults = TREES[command].raw_defaults()
    assert redacted(defaults) == defaults
