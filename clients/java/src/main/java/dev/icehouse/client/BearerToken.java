package dev.icehouse.client;

import java.util.Objects;
import java.util.function.Supplier;

/** The token of a connection: kept until the server refuses it, and then asked for anew where it has a source. */
final class BearerToken {
  private final Supplier<String> source;
  private final boolean isRenewable;
  private String known;

  private BearerToken(Supplier<String> source, boolean isRenewable) {
    this.source = source;
    this.isRenewable = isRenewable;
  }

  /** A token that is the same for ever. */
  static BearerToken of(String token) {
    return new BearerToken(() -> token, false);
  }

  /** One that the source has at first, and another one after each refusal. */
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

  /** Tells that the server refused this token; returns whether there may be another one. */
  synchronized boolean refused(String token) {
    if (isRenewable && token.equals(known)) {
      known = null;
    }
    return isRenewable;
  }
}
