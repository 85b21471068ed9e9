"""Chat templates in the manner of well-known families, and tokenizers that know their markers.

Written for these tests: what matters is what each family does with roles, tools and reasoning, not its words.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from tests.models.vocabulary import write_tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A template and the tokens it needs beside the common ones: spelling, and whether it is special."""

    template: str
    tokens: tuple[tuple[str, bool], ...] = ()


_CHATML_TOOLS: Final = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""

_CHATML_CALLS: Final = """\
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}"""

THINKING: Final = Family(
    # As Qwen3: the reasoning of turns before the last question is dropped.
    _CHATML_TOOLS
    + """{%- set last = namespace(index=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.index = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set role = message.role %}
{%- if role == 'user' or (role == 'system' and not loop.first) %}<|im_start|>{{ role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and loop.index0 > last.index %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content.lstrip('\\n') }}"""
    + _CHATML_CALLS
    + """<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
    (("<think>", False), ("</think>", False), ("<tool_call>", False), ("</tool_call>", False)),
)

REMEMBERING: Final = Family(
    # As THINKING, but every turn keeps its reasoning and nothing is trimmed: history is never rewritten.
    _CHATML_TOOLS
    + """{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}"""
    + _CHATML_CALLS
    + """<|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    THINKING.tokens,
)

HEADERS: Final = Family(
    # As Llama 3: any role has a header; tools are shown, and their calls carry no marker.
    """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
{{ {"name": call.function.name, "parameters": call.function.arguments} | tojson }}{% endfor %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    (("<|start_header_id|>", True), ("<|end_header_id|>", True)),
)

ALTERNATING: Final = Family(
    # As Mistral: user and assistant in turns, or an exception; the markers of calls are special tokens.
    """{{ bos_token }}{% set system = '' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- set turn = namespace(index=0, last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set turn.last = loop.index0 %}{% endfor %}
{%- set asked = namespace(count=-1) %}
{%- for message in messages %}
{%- if message.role in ['system', 'developer'] %}{{ raise_exception('The system comes first.') }}
{%- elif message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turn.index % 2 == 0) %}
{{- raise_exception('Roles must alternate, user first.') }}{% endif %}{% set turn.index = turn.index + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{% set asked.count = asked.count + 1 %}
{%- if tools and asked.count == turn.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}[INST]
{%- if loop.first %}{{ system }}{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Ids of tool calls have 9 characters.') }}{% endif %}
{{- '[TOOL_CALLS]' }}{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}
{%- endfor %}""",
    (
        ("[INST]", True),
        ("[/INST]", True),
        ("[AVAILABLE_TOOLS]", True),
        ("[/AVAILABLE_TOOLS]", True),
        ("[TOOL_RESULTS]", True),
        ("[/TOOL_RESULTS]", True),
        ("[TOOL_CALLS]", True),
        ("[ARGS]", True),
    ),
)

SYSTEMLESS: Final = Family(
    # As Gemma 2: no system role at all, no tools, "model" for the assistant.
    """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('No system role here') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' }}{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    (("<start_of_turn>", True), ("<end_of_turn>", True)),
)


def write_family(folder: Path, family: Family, *, extra_tokens: tuple[str, ...] = ()) -> Path:
    """Write a tokenizer of this family into `folder`; `extra_tokens` become whole tokens too."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(
        folder,
        context_token_limit=4096,
        chat_template=True,
        added=(*family.tokens, *((token, False) for token in extra_tokens)),
    )
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": family.template}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
