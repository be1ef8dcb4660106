"""Chat templates of known families in short form: what they do to earlier turns, and to answers of tools."""

from __future__ import annotations

from typing import NamedTuple

STOPS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Further special tokens of these templates."""
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + ({'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson) + '</tool_call>' }}{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_REASONING = (
    "{% set text = m.content or '' %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set reasoning = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)


def _chatml(assistant: str, prompt: str = _PROMPT, before: str = "") -> str:
    """Return a ChatML template; ``assistant`` writes a turn ``m`` of the policy, without its stop token."""
    return (
        before + _TOOLS
        + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        + assistant + "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
        "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + prompt
    )  # fmt: skip


_THINKS = (
    _REASONING + "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ text }}" + _CALLS
)
_EMPTY = (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and "
    "not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
_ALTERNATE = (
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
LLAMA_31 = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    """{{ '<|im_start|>assistant\n{"name": "' + c.name + '", "parameters": ' + (c.arguments | tojson) """
    "+ '}<|im_end|>' }}{% elif m.role == 'tool' %}{{ '<|im_start|>ipython\n' + (m.content | tojson) + "
    "'<|im_end|>' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}" + _PROMPT
)
NEMO = (
    _LAST_USER + "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == "
    "ns.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ ']<|im_end|>' }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{% endfor %}"
)
HARMONY = (
    _LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content %}{{ '<|im_start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{{ '<|im_start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>"
    "commentary json<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}{% else %}"
    "{% if m.thinking and loop.last %}{{ '<|im_start|>assistant<|channel|>analysis<|message|>' + m.thinking "
    "+ '<|end|>' }}{% endif %}{{ '<|im_start|>assistant<|channel|>final<|message|>' + m.content + "
    "('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
GLM = (
    _LAST_USER + "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{% else %}{{ '<|im_start|>' }}"
    + _REASONING + "{{ '\n<think>' + (reasoning if loop.index0 > ns.last else '') + '</think>\n' + text }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + "
    "'</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)  # fmt: skip


class Template(NamedTuple):
    """A template with what is known of it."""

    text: str
    history: tuple[str, ...] = ()
    """What it does to earlier turns."""
    shows_answers: bool = True
    """It renders the answers of tools."""
    writes_calls: bool = True
    one_call: bool = False
    stops: tuple[str, ...] = ("<|im_end|>",)
    variables: tuple[tuple[str, bool], ...] = ()


_DROPPED = "drops thinking before a message of the user"
_EMPTY_BLOCK = "drops '<think>\\n\\n</think>\\n\\n' in an earlier turn"
TEMPLATES = {
    "Qwen2.5": Template(_chatml("{{ m.content or '' }}" + _CALLS)),
    "Qwen3": Template(_chatml(_THINKS, _EMPTY, _LAST_USER), (_DROPPED,)),
    "Qwen3, enable_thinking=False": Template(
        _chatml(_THINKS, _EMPTY, _LAST_USER),
        (_EMPTY_BLOCK, _DROPPED),
        variables=(("enable_thinking", False),),
    ),
    "Qwen3.5": Template(_chatml(_THINKS, _OPENED, _LAST_USER), (_EMPTY_BLOCK, _DROPPED)),
    "QwQ": Template(
        _chatml(_REASONING + "{{ text }}" + _CALLS), (f"{_DROPPED} and the answer of a tool",)
    ),
    "Llama 3.1": Template(LLAMA_31, ("drops the text beside a call",), one_call=True),
    "Mistral Nemo": Template(
        NEMO,
        ("moves the list of tools to the last message of the user", "drops the text beside a call"),
    ),
    "Gemma, Mistral's first": Template(
        _chatml("{{ m.content }}").replace("{% if m.role ==", _ALTERNATE + "{% if m.role ==", 1),
        shows_answers=False,
    ),
    "Phi-3": Template(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ '<|im_start|>' + m.role + '\n' + "
        "m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _PROMPT,
        shows_answers=False,
    ),
    "SmolLM2": Template(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT,
        writes_calls=False,
    ),
    "gpt-oss": Template(
        HARMONY,
        ("writes '<|end|>' in place of '<|return|>' in an earlier turn", _DROPPED),
        one_call=True,
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),  # <|end|> stands in earlier turns alone
    ),
    "GLM-4.6": Template(GLM, (_DROPPED,), stops=("<|user|>", "<|observation|>")),
    "DeepSeek-V3.1": Template(
        _chatml(_REASONING + "{% if loop.index0 > ns.last %}{{ '<think>\n' + reasoning + '</think>' }}"
        "{% else %}{{ '</think>' }}{% endif %}{{ text }}" + _CALLS, _OPENED, _LAST_USER),
        ("drops '<think>\\n' in an earlier turn", _DROPPED),
    ),
}  # fmt: skip
"""By the model's family."""
