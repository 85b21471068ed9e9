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

// bearerToken is the token of a connection: kept until the server refuses it, and then asked for anew where it
// has a source. nil is none.
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
			return "", fmt.Errorf("icehouse: the token source: %w", err)
		}
		b.known = token
	}
	return b.known, nil
}

// isRenewed tells whether there may be another token than the one that a call was refused for, and forgets that.
func (b *bearerToken) isRenewed(err error, refused string) bool {
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

// authorized returns a context that carries the token, and the token. Where the caller's own metadata says who
// calls it is left alone.
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

// withToken calls attempt with a context that carries the token, and once more with another one where the
// server refuses the first and the token has a source.
func (s *settings) withToken(ctx context.Context, attempt func(context.Context) error) error {
	for isAgain := false; ; isAgain = true {
		authorized, token, err := s.authorized(ctx)
		if err != nil {
			return err
		}
		err = attempt(authorized)
		if isAgain || err == nil || token == "" || !s.token.isRenewed(err, token) {
			return err
		}
	}
}
