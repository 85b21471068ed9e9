/** Conversation: what each turn sends, what is kept in a file, files that are none. */
import { create } from "@bufbuild/protobuf";
import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversation } from "../src/index.js";
import { Role } from "../src/gen/icehouse/v1/prompt_pb.js";
import { ToolCallSchema } from "../src/gen/icehouse/v1/tool_pb.js";

const CALL = create(ToolCallSchema, { id: "c1", name: "weather", argumentsJson: '{"city": "Oslo"}' });

/** As the Python client writes it. */
const KEPT = {
  kind: "icehouse-conversation",
  version: 1,
  session_id: "s1",
  messages: [
    { role: "system", content: "Be brief." },
    { role: "user", content: "Rain? 🌧" },
    {
      role: "assistant",
      content: "",
      reasoning: "hm",
      tool_calls: [{ id: "c1", name: "weather", arguments_json: '{"city": "Oslo"}' }],
      token_ids: [1, 2],
    },
    { role: "tool", content: "dry", name: "weather", tool_call_id: "c1" },
  ],
};

function example(): Conversation {
  const talk = new Conversation({ system: "Be brief.", sessionId: "s1" });
  talk.say("Rain? 🌧");
  talk.add({ text: "", reasoning: "hm", toolCalls: [CALL], tokenIds: [1, 2] });
  talk.answer(CALL, "dry");
  return talk;
}

test("it is kept in the form of every language and reads back equal", () => {
  const text = JSON.stringify(example());
  assert.deepEqual(JSON.parse(text), KEPT);
  const again = Conversation.fromJSON(text);
  assert.deepEqual(again, example());
});

test("images come before the text, and are kept in the form of every language", () => {
  const talk = new Conversation();
  talk.say("What is it?", { images: [{ data: Buffer.from("GIF8"), mediaType: "image/gif" }] });
  const parts = [{ image: { data: "R0lGOA==", media_type: "image/gif" } }, { text: "What is it?" }];
  const text = JSON.stringify(talk);
  assert.deepEqual(JSON.parse(text).messages, [{ role: "user", content: "", parts }]);
  const [message] = Conversation.fromJSON(text).messages;
  assert(message);
  assert.deepEqual(message.parts.map(({ part }) => part.case), ["image", "text"]);
});

test("an image may have a uri and a detail", () => {
  const talk = new Conversation();
  talk.say("", { images: [{ uri: "https://example.org/a.png", detail: "low" }] });
  const [{ parts }] = JSON.parse(JSON.stringify(talk)).messages;
  assert.deepEqual(parts, [{ image: { uri: "https://example.org/a.png", detail: "IMAGE_DETAIL_LOW" } }]);
  const wrong = { uri: "a", detail: "tiny" } as never;
  assert.throws(() => talk.say("", { images: [wrong] }), { name: "TypeError", message: /auto, low, high, not "tiny"/ });
});

test("each has a session of its own", () => {
  assert.match(new Conversation().sessionId, /^[0-9a-f]{32}$/);
  assert.notEqual(new Conversation().sessionId, new Conversation().sessionId);
});

test("turns are removed and the system prompt is replaced", () => {
  const talk = new Conversation();
  talk.undo();
  talk.say("one");
  talk.add({ text: "two", reasoning: "", toolCalls: [], tokenIds: [] });
  talk.system = "Be kind.";
  talk.say("three");
  talk.undo();
  assert.deepEqual(talk.messages.map(({ content }) => content), ["Be kind.", "one", "two"]);
  talk.system = "";
  assert.deepEqual([talk.system, talk.messages.length], ["", 2]);
});

test("a plain list is read too", () => {
  const { messages } = Conversation.fromJSON('[{"role": "user", "content": "Hi"}]');
  assert.deepEqual(messages.map(({ role, content }) => [role, content]), [[Role.USER, "Hi"]]);
});

test("a role is kept by its name, a template's own too, and read as the API has it", () => {
  const { messages } = Conversation.fromJSON('[{"role": "ROLE_USER"}, {"role": "ipython", "content": "1"}]');
  assert.deepEqual(messages.map(({ role, roleName }) => [role, roleName]), [[Role.USER, ""], [Role.UNSPECIFIED, "ipython"]]);
  const kept = JSON.parse(JSON.stringify(new Conversation({ messages })));
  assert.deepEqual(kept.messages, [{ role: "user", content: "" }, { role: "ipython", content: "1" }]);
});

test("anything else is refused, with its place", () => {
  for (const [facts, problem] of [
    [{ messages: [] }, /kind undefined, version undefined/],
    [{ ...KEPT, version: 2 }, /version 2/],
    [{ kind: KEPT.kind, version: 1 }, /no list of messages/],
    ["Hi", /kind undefined/],
    [null, /kind undefined/],
    [["Hi"], /messages\[0\]/],
    [[{ role: "user", contents: "Hi" }], /messages\[0\].*contents/],
    [[{ role: "user", content: 7 }], /messages\[0\].*content/],
    [[{ content: "Hi" }], /messages\[0\] has no role/],
    [[{ role: "assistant", token_ids: [1, "two"] }], /messages\[0\].*token_ids/],
    [[{ role: "assistant", tool_calls: [{ ids: "1" }] }], /messages\[0\].*ids/],
  ] as const) {
    assert.throws(() => Conversation.fromJSON(JSON.stringify(facts)), problem);
  }
});
