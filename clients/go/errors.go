package icehouse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Error is the error of a failed call: the status of the server and its details.
//
// errors.Is finds context.Canceled and context.DeadlineExceeded in it, and status.FromError finds the gRPC status.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is a stable name for programs, such as "QUEUE_FULL". If the status is not the server's own, it is the name
	// of the code, such as "UNAVAILABLE".
	Reason string
	// Metadata holds the values that the message is about.
	Metadata map[string]string
	// Field is the request field at fault, as the protos spell it, such as "prompt.chat"; empty if there is none.
	Field string

	retryAfter *time.Duration
	status     *status.Status
}

// ErrorReason returns the reason as the API's constant. It is ERROR_REASON_UNSPECIFIED if the API has none of this name.
func (e *Error) ErrorReason() icehousev1.ErrorReason {
	return icehousev1.ErrorReason(icehousev1.ErrorReason_value["ERROR_REASON_"+e.Reason])
}

// RetryAfter returns how long to wait before trying again; false if the server did not say.
func (e *Error) RetryAfter() (time.Duration, bool) {
	if e.retryAfter == nil {
		return 0, false
	}
	return *e.retryAfter, true
}

func (e *Error) Error() string {
	if name := codeName(e.Code); e.Reason != name {
		return fmt.Sprintf("icehouse: %s (%s): %s", name, e.Reason, e.Message)
	}
	return fmt.Sprintf("icehouse: %s: %s", e.Reason, e.Message)
}

// GRPCStatus returns the status, for status.FromError.
func (e *Error) GRPCStatus() *status.Status {
	return e.status
}

// Is reports whether the call ended as target says, for errors.Is with the errors of package context.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		return e.Code == codes.Canceled
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	default:
		return false
	}
}

// errorFrom returns the error of a call as *Error. It returns nil and io.EOF, the regular end of a stream, as they are.
func errorFrom(err error) error {
	var known *Error
	if err == nil || errors.Is(err, io.EOF) || errors.As(err, &known) {
		return err
	}
	found := status.Convert(err)
	made := &Error{Code: found.Code(), Message: found.Message(), Reason: codeName(found.Code()), status: found}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			made.Reason, made.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.BadRequest:
			if violations := detail.GetFieldViolations(); len(violations) > 0 {
				made.Field = violations[0].GetField()
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay().AsDuration()
			made.retryAfter = &delay
		}
	}
	return made
}

// codeName returns the name that all languages share: "UNAVAILABLE", not Go's "Unavailable".
func codeName(of codes.Code) string {
	return code.Code(of).String()
}
