import { type ChatMessage, Role } from "./gen/icehouse/v1/prompt_pb.js";

const ROLES = {
  system: Role.SYSTEM,
  developer: Role.DEVELOPER,
  user: Role.USER,
  assistant: Role.ASSISTANT,
  tool: Role.TOOL,
} as const;

/** The name of a role in a conversation. */
export type RoleName = keyof typeof ROLES;

export const ROLE_NAMES: readonly string[] = Object.keys(ROLES);

/** Returns the role of this name; undefined if there is none, as for a template's own role. */
export function roleOf(name: string): Role | undefined {
  return Object.hasOwn(ROLES, name) ? ROLES[name as RoleName] : undefined;
}

/** Returns the name of a message's role: one of RoleName, or the template's own; "" if it has none. */
export function roleNameOf({ role, roleName }: ChatMessage): string {
  return ROLE_NAMES.find((name) => roleOf(name) === role) ?? roleName;
}
