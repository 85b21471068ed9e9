package dev.icehouse.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.Supplier;

/** What every failed call throws: the server's status with its details unpacked. */
public final class IcehouseException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  private final Status.Code code;
  private final String reason;
  private final Map<String, String> metadata;
  private final String field;
  private final Duration retryAfter;

  /** Unpacks the failure of a call; for those that were made with stubs over {@link IcehouseClient#channel}. */
  public IcehouseException(StatusRuntimeException failure) {
    super(failure.getMessage(), failure);
    List<Any> details = StatusProto.fromThrowable(failure).getDetailsList();
    Optional<ErrorInfo> info = find(details, ErrorInfo.class);
    this.code = failure.getStatus().getCode();
    this.reason = info.map(ErrorInfo::getReason).orElse(code.name());
    this.metadata = info.map(found -> Map.copyOf(found.getMetadataMap())).orElse(Map.of());
    this.field =
        find(details, BadRequest.class).stream()
            .flatMap(bad -> bad.getFieldViolationsList().stream())
            .map(BadRequest.FieldViolation::getField)
            .findFirst()
            .orElse(null);
    this.retryAfter =
        find(details, RetryInfo.class)
            .map(RetryInfo::getRetryDelay)
            .map(delay -> Duration.ofSeconds(delay.getSeconds(), delay.getNanos()))
            .orElse(null);
  }

  /** gRPC's status code. */
  public Status.Code code() {
    return code;
  }

  /**
   * Stable and machine readable: "QUEUE_FULL", "PROMPT_TOO_LONG" and so on. Where the status came from the
   * network and not from the server it is the code's name, such as "UNAVAILABLE".
   */
  public String reason() {
    return reason;
  }

  /** The numbers of the message. */
  public Map<String, String> metadata() {
    return metadata;
  }

  /** The request field at fault, in the protos' spelling. */
  public Optional<String> field() {
    return Optional.ofNullable(field);
  }

  /** When trying again makes sense; empty when the server named no delay. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** Returns what the call returns, and throws what it throws as this. */
  static <T> T translated(Supplier<T> call) {
    try {
      return call.get();
    } catch (StatusRuntimeException failure) {
      throw new IcehouseException(failure);
    }
  }

  private static <T extends Message> Optional<T> find(List<Any> details, Class<T> type) {
    for (Any detail : details) {
      if (detail.is(type)) {
        try {
          return Optional.of(detail.unpack(type));
        } catch (InvalidProtocolBufferException error) {
          throw new IllegalStateException("the server sent a " + type.getSimpleName() + " that is none", error);
        }
      }
    }
    return Optional.empty();
  }
}
