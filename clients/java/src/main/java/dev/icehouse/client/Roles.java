package dev.icehouse.client;

import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.Role;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Collectors;

/** The names of roles, such as "user". */
final class Roles {
  private static final Map<Role, String> NAMES =
      Map.of(
          Role.ROLE_SYSTEM, "system",
          Role.ROLE_DEVELOPER, "developer",
          Role.ROLE_USER, "user",
          Role.ROLE_ASSISTANT, "assistant",
          Role.ROLE_TOOL, "tool");
  private static final Map<String, Role> ROLES =
      NAMES.entrySet().stream().collect(Collectors.toMap(Map.Entry::getValue, Map.Entry::getKey));

  private Roles() {}

  /** Returns the role of this name; empty if there is none, as for a template's own role. */
  static Optional<Role> of(String name) {
    return Optional.ofNullable(ROLES.get(name));
  }

  /** Returns the name of a message's role, the template's own if it has one of those; empty without a role. */
  static String nameOf(ChatMessage message) {
    return NAMES.getOrDefault(message.getRole(), message.getRoleName());
  }
}
