import { type DescMessage, fromBinary, type MessageShape } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { type ServiceError, status } from "@grpc/grpc-js";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "./gen/google/rpc/status_pb.js";

const DETAILS_KEY = "grpc-status-details-bin";

/** What every failed call throws: the server's status with its details unpacked. */
export class IcehouseError extends Error {
  override readonly name = "IcehouseError";
  /** gRPC's status code, as in `status` of @grpc/grpc-js. */
  readonly code: status;
  /**
   * Stable and machine readable: "QUEUE_FULL", "PROMPT_TOO_LONG" and so on. Where the status came from the
   * network and not from the server it is the code's name, such as "UNAVAILABLE".
   */
  readonly reason: string;
  /** The numbers of the message. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The request field at fault, in the protos' spelling. Absent: no field is. */
  readonly field: string | undefined;
  /** When trying again makes sense. Absent: the server named no delay. */
  readonly retryAfterMs: number | undefined;

  constructor(error: ServiceError) {
    const codeName = status[error.code] ?? "UNKNOWN";
    const details = detailsOf(error);
    const info = find(details, ErrorInfoSchema);
    const reason = info?.reason || codeName;
    super(`${codeName}${reason === codeName ? "" : ` (${reason})`}: ${error.details}`, { cause: error });
    this.code = error.code;
    this.reason = reason;
    this.metadata = info?.metadata ?? {};
    this.field = find(details, BadRequestSchema)?.fieldViolations[0]?.field;
    const delay = find(details, RetryInfoSchema)?.retryDelay;
    this.retryAfterMs = delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
}

/** Returns what a call threw as IcehouseError; what is no status stays what it is. */
export function errorFrom(error: unknown): unknown {
  return isServiceError(error) ? new IcehouseError(error) : error;
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error;
}

function detailsOf(error: ServiceError): Status["details"] {
  const [packed] = error.metadata.get(DETAILS_KEY);
  return Buffer.isBuffer(packed) ? fromBinary(StatusSchema, packed).details : [];
}

function find<T extends DescMessage>(details: Status["details"], schema: T): MessageShape<T> | undefined {
  for (const detail of details) {
    const found = anyUnpack(detail, schema);
    if (found) return found;
  }
  return undefined;
}
