package dev.icehouse.client;

import java.net.InetAddress;
import java.net.URLDecoder;
import java.net.UnknownHostException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Locale;
import java.util.regex.Pattern;

/**
 * Whether a gRPC target names only this machine; no name is resolved. A proxy on another machine would look for the
 * server on its own.
 */
final class LocalTarget {
  private static final Pattern SOCKET_SCHEME =
      Pattern.compile("^(unix|unix-abstract|vsock):", Pattern.CASE_INSENSITIVE);

  /** The part of a target before its addresses. */
  private static final Pattern SCHEME =
      Pattern.compile("^(dns|ipv4|ipv6|passthrough):(//[^/]*/)?", Pattern.CASE_INSENSITIVE);

  private static final Pattern IPV4 = Pattern.compile("((^|\\.)(25[0-5]|2[0-4]\\d|1?\\d?\\d)){4}");
  private static final Pattern IPV6 = Pattern.compile("[0-9a-f.]*:[0-9a-f:.]*");

  private LocalTarget() {}

  static boolean isLocal(String target) {
    if (SOCKET_SCHEME.matcher(target).find()) {
      return true;
    }
    var places = unescaped(SCHEME.matcher(target).replaceFirst("")).split(",", -1);
    return Arrays.stream(places).allMatch(place -> isLocalHost(hostOf(place)));
  }

  private static String unescaped(String text) {
    try {
      return URLDecoder.decode(text.replace("+", "%2B"), StandardCharsets.UTF_8);
    } catch (IllegalArgumentException e) {
      return text;
    }
  }

  /** Returns the host of "host:port", of "[::1]:port" and of either without a port. */
  private static String hostOf(String place) {
    if (place.startsWith("[")) {
      int end = place.indexOf(']');
      return place.substring(1, end < 0 ? place.length() : end);
    }
    int colon = place.indexOf(':');
    return colon < 0 || place.indexOf(':', colon + 1) >= 0 ? place : place.substring(0, colon);
  }

  private static boolean isLocalHost(String host) {
    String name = host.toLowerCase(Locale.ROOT).replaceFirst("\\.$", "");
    if (name.equals("localhost") || name.endsWith(".localhost")) {
      return true;
    }
    String literal = name.replaceFirst("%.*$", "");
    if (!IPV4.matcher(literal).matches() && !IPV6.matcher(literal).matches()) {
      return false;
    }
    try {
      // Of a literal nothing is resolved. What listens everywhere listens here, and a system connects it so.
      var address = InetAddress.getByName(literal);
      return address.isLoopbackAddress() || address.isAnyLocalAddress();
    } catch (UnknownHostException e) {
      return false;
    }
  }
}
