package dev.icehouse.client;

import static dev.icehouse.client.IcehouseException.translated;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import dev.icehouse.v1.GetServerRequest;
import dev.icehouse.v1.Server;
import dev.icehouse.v1.ServerServiceGrpc.ServerServiceBlockingStub;
import dev.icehouse.v1.ServerState;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

/** Asks a server for its state until it accepts requests, or until the deadline. */
final class Readiness {
  private static final long FIRST_DELAY_NANOS = Duration.ofMillis(100).toNanos();
  private static final long LAST_DELAY_NANOS = Duration.ofSeconds(1).toNanos();

  private Readiness() {}

  static Server await(ServerServiceBlockingStub stub, Duration timeout) {
    var bounded = stub.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS);
    Deadline deadline = bounded.getCallOptions().getDeadline();
    String last = "it has not answered";
    for (long delay = FIRST_DELAY_NANOS; ; delay = Math.min(2 * delay, LAST_DELAY_NANOS)) {
      try {
        Server server = translated(() -> bounded.getServer(GetServerRequest.getDefaultInstance())).getServer();
        if (server.getState() == ServerState.SERVER_STATE_READY) {
          return server;
        }
        if (server.getState() == ServerState.SERVER_STATE_FAILED) {
          throw engineFailed();
        }
        last = "it is " + server.getState().name().replaceFirst("^SERVER_STATE_", "");
      } catch (IcehouseException refused) {
        if (refused.code() == Status.Code.DEADLINE_EXCEEDED) {
          throw late(last);
        }
        if (refused.code() != Status.Code.UNAVAILABLE) {
          throw refused;
        }
        last = told(refused);
      }
      if (deadline.isExpired()) {
        throw late(last);
      }
      // After an interrupt the next call throws.
      LockSupport.parkNanos(Math.min(delay, deadline.timeRemaining(TimeUnit.NANOSECONDS)));
    }
  }

  /** Returns the message with its cause: gRPC's own is often just "io exception". */
  private static String told(IcehouseException refused) {
    Throwable cause = Status.fromThrowable(refused.getCause()).getCause();
    return cause == null ? refused.getMessage() : refused.getMessage() + ": " + cause.getMessage();
  }

  private static IcehouseException late(String last) {
    var status = Status.DEADLINE_EXCEEDED.withDescription("the server was not ready in time: " + last);
    return new IcehouseException(status.asRuntimeException());
  }

  private static IcehouseException engineFailed() {
    var status =
        com.google.rpc.Status.newBuilder()
            .setCode(Status.Code.INTERNAL.value())
            .setMessage("the server's engine has failed; start it again")
            .addDetails(Any.pack(ErrorInfo.newBuilder().setReason("ENGINE_FAILED").build()));
    return new IcehouseException(StatusProto.toStatusRuntimeException(status.build()));
  }
}
