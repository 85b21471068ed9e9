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

/** Thrown by every failed call: the server's status with its details. */
public final class IcehouseException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  private final Status.Code code;
  private final String reason;
  private final Map<String, String> metadata;
  private final String field;
  private final Duration retryAfter;

  /** Reads the failure of a call, for calls with stubs over {@link IcehouseClient#channel}. */
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
   * A value of {@link dev.icehouse.v1.ErrorReason} without its prefix, such as "QUEUE_FULL". If the status came from
   * the network and not from the server, the name of the code, such as "UNAVAILABLE".
   */
  public String reason() {
    return reason;
  }

  /** The values in the message, by name. */
  public Map<String, String> metadata() {
    return metadata;
  }

  /** The field at fault, as the protos spell it, such as "prompt.text". Empty if no field is. */
  public Optional<String> field() {
    return Optional.ofNullable(field);
  }

  /** When it makes sense to try again. Empty if the server did not say. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** Returns what the call returns, and throws its failure as this exception. */
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
          throw new IllegalStateException("the server sent a malformed " + type.getSimpleName(), error);
        }
      }
    }
    return Optional.empty();
  }
}
