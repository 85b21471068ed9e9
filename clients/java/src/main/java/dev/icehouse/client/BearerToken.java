package dev.icehouse.client;

import java.util.Objects;
import java.util.function.Supplier;

/** The token of a client. It is kept until the server refuses it; then its source, if it has one, is asked again. */
final class BearerToken {
  private final Supplier<String> source;
  private final boolean isRenewable;
  private String known;

  private BearerToken(Supplier<String> source, boolean isRenewable) {
    this.source = source;
    this.isRenewable = isRenewable;
  }

  /** A token that never changes. */
  static BearerToken of(String token) {
    return new BearerToken(() -> token, false);
  }

  /** A token from a source, which is asked again after a refusal. */
  static BearerToken from(Supplier<String> source) {
    return new BearerToken(source, true);
  }

  /** Returns the token to send. */
  synchronized String current() {
    if (known == null) {
      known = Objects.requireNonNull(source.get(), "the token's source returned null");
    }
    return known;
  }

  /** Forgets a token that the server refused; returns whether there may be another one. */
  synchronized boolean refused(String token) {
    if (isRenewable && token.equals(known)) {
      known = null;
    }
    return isRenewable;
  }
}
