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
)

// Error is what every failed call returns: the server's status with its details unpacked.
//
// errors.Is finds context.Canceled and context.DeadlineExceeded in it where the call ended so, and
// status.FromError finds gRPC's own form.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is stable and machine readable: "QUEUE_FULL", "PROMPT_TOO_LONG" and so on. Where the status
	// came from the network and not from the server it is the code's name, such as "UNAVAILABLE".
	Reason string
	// Metadata holds the numbers of the message.
	Metadata map[string]string
	// Field is the request field at fault, in the protos' spelling; empty when no field is.
	Field string

	retryAfter *time.Duration
	status     *status.Status
}

// RetryAfter returns the delay after which trying again makes sense; false when the server named none.
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

// GRPCStatus lets status.FromError find the status.
func (e *Error) GRPCStatus() *status.Status {
	return e.status
}

// Is lets errors.Is find how a context ended.
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

// errorFrom returns a call's error as *Error; nil and io.EOF, the good end of a stream, stay what they are.
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

// codeName returns the name that every language knows, "UNAVAILABLE" and not Go's "Unavailable".
func codeName(of codes.Code) string {
	return code.Code(of).String()
}
