import { type DescField, type DescMessage, isMessage } from "@bufbuild/protobuf";

/** Names of fields in other APIs, and what they are called here. */
const MEANT: Readonly<Record<string, string>> = {
  bestOf: "completions",
  chatTemplateKwargs: "templateArguments",
  functions: "prompt.tools",
  guidedJson: "responseFormat",
  maxCompletionTokens: "maxOutputTokens",
  maxNewTokens: "maxOutputTokens",
  maxTokens: "maxOutputTokens",
  messages: "prompt",
  n: "completions",
  stopSequences: "stop",
  timeout: "timeoutMs",
  topLogprobs: "logprobs.topCount",
  topN: "topCount",
};

/**
 * Throws TypeError for a key that the message has no field for, at any depth, and suggests one. The compiler finds
 * most of them, but at run time they would be ignored.
 */
export function refuseUnknownFields(schema: DescMessage, init: object): void {
  if (isMessage(init) || schema.typeName.startsWith("google.protobuf.")) return;
  for (const [name, value] of Object.entries(init)) {
    const member = schema.members.find(({ localName }) => localName === name);
    if (!member) throw new TypeError(unknown(schema.name, name, fieldPaths(schema)));
    if (member.kind === "field") refuseWithin(member, value);
    else if (value?.case !== undefined) refuseWithin(chosen(member.fields, name, value.case), value.value);
  }
}

/** Throws TypeError for a key that is none of `known`, and suggests one. */
export function refuseUnknownOptions(options: object, known: readonly string[]): void {
  for (const name of Object.keys(options)) {
    if (!known.includes(name)) throw new TypeError(unknown("a call's options", name, known));
  }
}

function refuseWithin(field: DescField, value: unknown): void {
  if (!field.message || typeof value !== "object" || value === null) return;
  if (field.fieldKind === "message") refuseUnknownFields(field.message, value);
  else if (field.fieldKind === "list" && Array.isArray(value)) {
    for (const item of value) refuseUnknownFields(field.message, item);
  }
}

function chosen(fields: readonly DescField[], oneof: string, name: string): DescField {
  const field = fields.find(({ localName }) => localName === name);
  if (!field) throw new TypeError(unknown(`the oneof ${oneof}`, name, fields.map(({ localName }) => localName)));
  return field;
}

/** Returns the names of the fields, and of those one message further down as "sampling.temperature". */
function fieldPaths(schema: DescMessage): string[] {
  return schema.members.flatMap((member) => {
    const { localName } = member;
    if (member.kind !== "field" || member.fieldKind !== "message") return [localName];
    return [localName, ...member.message.members.map((inner) => `${localName}.${inner.localName}`)];
  });
}

function unknown(owner: string, name: string, known: readonly string[]): string {
  const near = nearest(name, known);
  const own = known.filter((path) => !path.includes("."));
  return `${owner}: there is no '${name}'; ${near ? `did you mean '${near}'?` : `there are ${own.join(", ")}`}`;
}

function nearest(name: string, known: readonly string[]): string | undefined {
  const camel = name.replace(/_+([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
  const meant = MEANT[camel];
  if (meant !== undefined && known.includes(meant)) return meant;
  const ranked = known
    .map((path) => ({ path, distance: editDistance(camel, path.slice(path.lastIndexOf(".") + 1)) }))
    .sort((one, other) => one.distance - other.distance);
  const [best] = ranked;
  return best && best.distance <= Math.floor(camel.length / 3) ? best.path : undefined;
}

/** Returns the number of letters to insert, delete or replace (Levenshtein 1966). */
function editDistance(one: string, other: string): number {
  let above = Array.from({ length: other.length + 1 }, (_, index) => index);
  for (let row = 1; row <= one.length; row++) {
    const here = [row];
    for (let column = 1; column <= other.length; column++) {
      const exchanged = above[column - 1]! + (one[row - 1] === other[column - 1] ? 0 : 1);
      here.push(Math.min(above[column]! + 1, here[column - 1]! + 1, exchanged));
    }
    above = here;
  }
  return above[other.length]!;
}
