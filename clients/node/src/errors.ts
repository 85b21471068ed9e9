import { type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { type Any, anyUnpack } from "@bufbuild/protobuf/wkt";
import type { status } from "@grpc/grpc-js";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { CODE_NAMES } from "./status.js";

/** A status as it came, whatever brought it. */
export interface StatusFacts {
  readonly code: status;
  readonly message: string;
  readonly details: readonly Any[];
  readonly cause: unknown;
}

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

  constructor({ code, message, details, cause }: StatusFacts) {
    const codeName = CODE_NAMES[code] ?? "UNKNOWN";
    const info = find(details, ErrorInfoSchema);
    const reason = info?.reason || codeName;
    super(`${codeName}${reason === codeName ? "" : ` (${reason})`}: ${message}`, { cause });
    this.code = code;
    this.reason = reason;
    this.metadata = info?.metadata ?? {};
    this.field = find(details, BadRequestSchema)?.fieldViolations[0]?.field;
    const delay = find(details, RetryInfoSchema)?.retryDelay;
    this.retryAfterMs = delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
}

function find<T extends DescMessage>(details: readonly Any[], schema: T): MessageShape<T> | undefined {
  for (const detail of details) {
    const found = anyUnpack(detail, schema);
    if (found) return found;
  }
  return undefined;
}
