package dev.icehouse.client;

import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Message;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.ChatPrompt;
import dev.icehouse.v1.ContentPart;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.InfillPrompt;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.TokenPrompt;
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
 * The key by which a load balancer sends prompts with one beginning to one server.
 *
 * <p>Every client library makes it the same way: the first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖
 * 0x00 ‖ variant ‖ beginning). The kind is "text", "tokens", "chat", "infill" or, for Rerank, "query". The
 * beginning is the first 1024 bytes of the text, the query or the infill's prefix in UTF-8; the first 256 token ids, each as four bytes,
 * little-endian; or of a conversation each message up to and with the first of role "user", as role ‖ 0x00 ‖
 * content ‖ 0x00 with the texts of parts joined to the content, cut after 4096 bytes. The variant is what else
 * makes KV another: empty without an adapter and tools, otherwise adapter ‖ 0x00 and of each tool name ‖ 0x00
 * ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
 */
public final class PrefixKey {
  /** The header that carries the key with every call whose cache it concerns. */
  public static final String HEADER = "icehouse-prefix-key";

  private static final int TEXT_BYTES = 1024;
  private static final int TOKEN_COUNT = 256;
  private static final int CHAT_BYTES = 4096;

  private static final List<String> KINDS = List.of("text", "chat", "tokens", "infill");
  private static final Set<Descriptor> PROMPTED =
      Set.of(
          GenerateRequest.getDescriptor(),
          WarmRequest.getDescriptor(),
          ExplainRequest.getDescriptor(),
          PinRequest.getDescriptor(),
          UnpinRequest.getDescriptor(),
          EvictRequest.getDescriptor());

  private PrefixKey() {}

  /**
   * Returns the request's key: 16 hex digits, equal for prompts that begin alike. Empty for messages without a
   * prompt that is cached; those with one are of Generate, Stream, Warm, Explain, Pin, Unpin, Evict and Rerank.
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
    String adapter = (String) request.getField(type.findFieldByName("adapter"));
    List<?> tools = (List<?>) request.getField(type.findFieldByName("tools"));
    return KINDS.stream()
        .map(type::findFieldByName)
        .filter(field -> field != null && request.hasField(field))
        .findFirst()
        .map(kind -> key(model, kind.getName(), variant(adapter, tools), beginning(request.getField(kind))));
  }

  private static String key(String model, String kind, String variant, byte[] beginning) {
    MessageDigest digest = sha256();
    digest.update(utf8(model + "\0" + kind + "\0" + variant));
    digest.update(beginning);
    return HexFormat.of().formatHex(digest.digest(), 0, 8);
  }

  private static String variant(String adapter, List<?> tools) {
    if (adapter.isEmpty() && tools.isEmpty()) {
      return "";
    }
    var text = new StringBuilder(adapter).append('\0');
    for (Object each : tools) {
      Tool tool = (Tool) each;
      text.append(tool.getName()).append('\0');
      text.append(tool.getDescription()).append('\0');
      text.append(tool.getParametersJson()).append('\0');
    }
    return text.toString();
  }

  private static byte[] beginning(Object prompt) {
    if (prompt instanceof ChatPrompt chat) {
      return cut(turns(chat.getMessagesList()), CHAT_BYTES);
    }
    if (prompt instanceof TokenPrompt tokens) {
      return littleEndian(tokens.getIdsList());
    }
    if (prompt instanceof InfillPrompt infill) {
      return firstBytes(infill.getPrefix());
    }
    return firstBytes((String) prompt);
  }

  private static byte[] littleEndian(List<Integer> ids) {
    List<Integer> first = ids.subList(0, Math.min(ids.size(), TOKEN_COUNT));
    ByteBuffer bytes = ByteBuffer.allocate(first.size() * Integer.BYTES).order(ByteOrder.LITTLE_ENDIAN);
    first.forEach(bytes::putInt);
    return bytes.array();
  }

  private static byte[] turns(List<ChatMessage> messages) {
    var turns = new ByteArrayOutputStream();
    for (ChatMessage message : messages) {
      turns.writeBytes(utf8(message.getRole() + "\0" + message.getContent()));
      for (ContentPart part : message.getPartsList()) {
        turns.writeBytes(utf8(part.getText()));
      }
      turns.write(0);
      if (message.getRole().equals("user") || turns.size() >= CHAT_BYTES) {
        break;
      }
    }
    return turns.toByteArray();
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
