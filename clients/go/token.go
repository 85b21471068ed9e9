package icehouse

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

const authorizationHeader = "authorization"

// bearerToken is the token of a connection. It is kept until the server refuses it, then fetched again from its source,
// if it has one.
type bearerToken struct {
	source func(context.Context) (string, error)

	mutex sync.Mutex
	known string
}

// current returns the token to send.
func (b *bearerToken) current(ctx context.Context) (string, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.known == "" && b.source != nil {
		token, err := b.source(ctx)
		if err != nil {
			return "", fmt.Errorf("icehouse: token source: %w", err)
		}
		b.known = token
	}
	return b.known, nil
}

// renew reports whether a call that failed with err may be repeated with another token, and drops the refused one.
func (b *bearerToken) renew(err error, refused string) bool {
	var known *Error
	if refused == "" || b.source == nil || !errors.As(err, &known) || known.Code != codes.Unauthenticated {
		return false
	}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.known == refused {
		b.known = ""
	}
	return true
}

// authorized returns a context that carries the token, and the token. A caller's own authorization header comes first.
func (s *settings) authorized(ctx context.Context) (context.Context, string, error) {
	if s.token == nil {
		return ctx, "", nil
	}
	if own, _ := metadata.FromOutgoingContext(ctx); len(own.Get(authorizationHeader)) > 0 {
		return ctx, "", nil
	}
	token, err := s.token.current(ctx)
	if err != nil || token == "" {
		return ctx, "", err
	}
	return metadata.AppendToOutgoingContext(ctx, authorizationHeader, "Bearer "+token), token, nil
}

// withToken calls attempt with a context that carries the token, and once more with a new token if the server refuses
// the first one.
func (s *settings) withToken(ctx context.Context, attempt func(context.Context) error) error {
	for repeated := false; ; repeated = true {
		authorized, token, err := s.authorized(ctx)
		if err != nil {
			return err
		}
		err = attempt(authorized)
		if repeated || err == nil || token == "" || !s.token.renew(err, token) {
			return err
		}
	}
}
