"""Tools and tool calls in chat templates: what reaches the template, and that no text becomes a control token."""

from __future__ import annotations

import pytest

from calib.chat_template import ChatTemplate, checked_messages
from calib.errors import CalibError

TEMPLATE = ("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
            "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"<s>": "x <s>"}}}
MESSAGES = [{"role": "user", "content": "hi <s>"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"}]
TOOLS = [{"type": "function", "function": {"name": "f<s>"}}]


def test_tools_and_calls_reach_the_template() -> None:
    template = ChatTemplate(TEMPLATE, "a model")
    assert template.takes_tools
    assert template.render(MESSAGES, {}, False, TOOLS) == '[f<s>]<s>user:hi <s><s>assistant:{"<s>": "x <s>"}<s>tool:ok'


def test_every_string_is_masked_keys_too() -> None:
    template = ChatTemplate(TEMPLATE, "a model")
    messages, tools, originals = template.mask(MESSAGES, ["<s>"], TOOLS)
    rendered = template.render(messages, {}, False, tools)
    assert rendered.count("<s>") == 3  # the template's own
    for mark, original in originals.items():
        rendered = rendered.replace(mark, original)
    assert rendered == template.render(MESSAGES, {}, False, TOOLS)


def test_a_template_without_tools_refuses_them() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "a model")
    assert not template.takes_tools
    with pytest.raises(CalibError, match="takes no tools"):
        template.render(MESSAGES, {}, False, TOOLS)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "a"},
                                     {"role": "assistant", "content": "", "tool_calls": "f"},
                                     {"role": "user", "content": "a", "audio": "b"}, {"role": 1, "content": "a"}])
def test_what_is_no_message_is_refused(message) -> None:
    with pytest.raises(CalibError, match="message 0"):
        checked_messages([message])
