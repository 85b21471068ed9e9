package dev.icehouse.client;

import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.GenerateRequest;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;

/**
 * The key by which a load balancer sends prompts with one beginning to one server.
 *
 * <p>Every client library makes it the same way: the first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖
 * 0x00 ‖ beginning). The kind is "text", "tokens" or "chat". The beginning is the first 1024 bytes of the
 * text in UTF-8; the first 256 token ids, each as four bytes, little-endian; or of a conversation each
 * message up to and with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00, cut after 4096 bytes.
 */
public final class PrefixKey {
  /** The header that carries the key with every Generate and Stream. */
  public static final String HEADER = "icehouse-prefix-key";

  private static final int TEXT_BYTES = 1024;
  private static final int TOKEN_COUNT = 256;
  private static final int CHAT_BYTES = 4096;

  private PrefixKey() {}

  /** Returns the request's key: 16 hex digits, equal for prompts that begin alike. */
  public static String of(GenerateRequest request) {
    MessageDigest digest = sha256();
    digest.update(utf8(request.getModel() + "\0" + kind(request) + "\0"));
    digest.update(beginning(request));
    return HexFormat.of().formatHex(digest.digest(), 0, 8);
  }

  private static String kind(GenerateRequest request) {
    return switch (request.getPromptCase()) {
      case TEXT -> "text";
      case TOKENS -> "tokens";
      case CHAT -> "chat";
      case PROMPT_NOT_SET -> "";
    };
  }

  private static byte[] beginning(GenerateRequest request) {
    return switch (request.getPromptCase()) {
      case TEXT -> cut(utf8(request.getText()), TEXT_BYTES);
      case TOKENS -> littleEndian(request.getTokens().getIdsList());
      case CHAT -> cut(turns(request.getChat().getMessagesList()), CHAT_BYTES);
      case PROMPT_NOT_SET -> new byte[0];
    };
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
      turns.writeBytes(utf8(message.getRole() + "\0" + message.getContent() + "\0"));
      if (message.getRole().equals("user") || turns.size() >= CHAT_BYTES) {
        break;
      }
    }
    return turns.toByteArray();
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
