package dev.icehouse.client;

import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Message;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.ChatPrompt;
import dev.icehouse.v1.ContentPart;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.ExportRequest;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.Role;
import dev.icehouse.v1.Tool;
import dev.icehouse.v1.UnpinRequest;
import dev.icehouse.v1.WarmRequest;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Optional;
import java.util.Set;

/**
 * The key by which a load balancer sends prompts with the same beginning to the same server.
 *
 * <p>Every client library computes it in the same way: the first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖
 * variant ‖ beginning). The kind is "text", "tokens", "chat" or "infill", and "query" for Rerank. The beginning is
 *
 * <ul>
 *   <li>the first 1024 bytes, in UTF-8, of the text, the query or the infill's prefix;
 *   <li>the first 256 token ids, each as four bytes, little-endian;
 *   <li>of a conversation, the messages up to and including the first one of the user, each as role ‖ 0x00 ‖ content ‖
 *       0x00, cut after 4096 bytes. The role is its name, such as "user"; the texts of parts are appended to the
 *       content.
 * </ul>
 *
 * <p>The variant is empty without an adapter and tools; otherwise it is adapter ‖ 0x00, followed for each tool by name
 * ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
 */
public final class PrefixKey {
  /** The header that carries the key with every call that uses the prefix cache. */
  public static final String HEADER = "icehouse-prefix-key";

  private static final int TEXT_BYTES = 1024;
  private static final int TOKEN_COUNT = 256;
  private static final int CHAT_BYTES = 4096;

  private static final Set<Descriptor> PROMPTED =
      Set.of(
          GenerateRequest.getDescriptor(),
          WarmRequest.getDescriptor(),
          ExplainRequest.getDescriptor(),
          PinRequest.getDescriptor(),
          UnpinRequest.getDescriptor(),
          EvictRequest.getDescriptor(),
          ExportRequest.getDescriptor());

  private PrefixKey() {}

  /**
   * Returns the request's key, 16 hex digits. Empty for a request without a prompt that can be cached; Generate,
   * Stream, Explain, Warm, Pin, Unpin, Evict, Export and Rerank have one.
   */
  public static Optional<String> of(Message request) {
    if (request instanceof RerankRequest rerank) {
      String variant = variant(rerank.getAdapter(), List.of());
      return Optional.of(key(rerank.getModel(), "query", variant, firstBytes(rerank.getQuery())));
    }
    Descriptor type = request.getDescriptorForType();
    if (!PROMPTED.contains(type)) {
      return Optional.empty();
    }
    String model = (String) request.getField(type.findFieldByName("model"));
    Prompt prompt = (Prompt) request.getField(type.findFieldByName("prompt"));
    String variant = variant(prompt.getAdapter(), prompt.getToolsList());
    return switch (prompt.getFormCase()) {
      case TEXT -> Optional.of(key(model, "text", variant, firstBytes(prompt.getText())));
      case CHAT -> Optional.of(key(model, "chat", variant, turns(prompt.getChat())));
      case TOKENS -> Optional.of(key(model, "tokens", variant, littleEndian(prompt.getTokens().getIdsList())));
      case INFILL -> Optional.of(key(model, "infill", variant, firstBytes(prompt.getInfill().getPrefix())));
      case FORM_NOT_SET -> Optional.empty();
    };
  }

  private static String key(String model, String kind, String variant, byte[] beginning) {
    MessageDigest digest = sha256();
    digest.update(utf8(model + "\0" + kind + "\0" + variant));
    digest.update(beginning);
    return HexFormat.of().formatHex(digest.digest(), 0, 8);
  }

  private static String variant(String adapter, List<Tool> tools) {
    if (adapter.isEmpty() && tools.isEmpty()) {
      return "";
    }
    var text = new StringBuilder(adapter).append('\0');
    for (Tool tool : tools) {
      text.append(tool.getName()).append('\0');
      text.append(tool.getDescription()).append('\0');
      text.append(tool.getParametersJson()).append('\0');
    }
    return text.toString();
  }

  private static byte[] littleEndian(List<Integer> ids) {
    List<Integer> first = ids.subList(0, Math.min(ids.size(), TOKEN_COUNT));
    ByteBuffer bytes = ByteBuffer.allocate(first.size() * Integer.BYTES).order(ByteOrder.LITTLE_ENDIAN);
    first.forEach(bytes::putInt);
    return bytes.array();
  }

  private static byte[] turns(ChatPrompt chat) {
    var turns = new ByteArrayOutputStream();
    for (ChatMessage message : chat.getMessagesList()) {
      turns.writeBytes(utf8(Roles.nameOf(message) + "\0" + message.getContent()));
      for (ContentPart part : message.getPartsList()) {
        turns.writeBytes(utf8(part.getText()));
      }
      turns.write(0);
      if (message.getRole() == Role.ROLE_USER || turns.size() >= CHAT_BYTES) {
        break;
      }
    }
    return cut(turns.toByteArray(), CHAT_BYTES);
  }

  private static byte[] firstBytes(String text) {
    return cut(utf8(text), TEXT_BYTES);
  }

  private static byte[] cut(byte[] bytes, int limit) {
    return bytes.length <= limit ? bytes : Arrays.copyOf(bytes, limit);
  }

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static MessageDigest sha256() {
    try {
      return MessageDigest.getInstance("SHA-256");
    } catch (NoSuchAlgorithmException error) {
      throw new AssertionError("every Java platform has SHA-256", error);
    }
  }
}
