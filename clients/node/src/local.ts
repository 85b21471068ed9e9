import { BlockList, isIP } from "node:net";

const SOCKET_SCHEME = /^(unix|unix-abstract|vsock):/i;
/** The part of a target before its addresses. */
const SCHEME = /^(dns|ipv4|ipv6|passthrough):(\/\/[^/]*\/)?/i;

/** Loopback, and the addresses for all interfaces: connecting to those reaches this machine. */
const LOCAL_ADDRESSES = new BlockList();
LOCAL_ADDRESSES.addSubnet("127.0.0.0", 8, "ipv4");
LOCAL_ADDRESSES.addAddress("0.0.0.0", "ipv4");
LOCAL_ADDRESSES.addAddress("::1", "ipv6");
LOCAL_ADDRESSES.addAddress("::", "ipv6");

/**
 * Returns whether a gRPC target names only this machine; no name is resolved. A proxy on another machine would look
 * for the server on its own.
 */
export function isLocal(target: string): boolean {
  if (SOCKET_SCHEME.test(target)) return true;
  return unescaped(target.replace(SCHEME, ""))
    .split(",")
    .every((place) => isLocalHost(hostOf(place)));
}

function unescaped(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Returns the host of "host:port", of "[::1]:port" and of either without a port. */
function hostOf(place: string): string {
  if (place.startsWith("[")) return place.slice(1).split("]")[0] ?? "";
  const parts = place.split(":");
  return parts.length > 2 ? place : (parts[0] ?? "");
}

function isLocalHost(host: string): boolean {
  const name = host.toLowerCase().replace(/\.$/, "");
  if (name === "localhost" || name.endsWith(".localhost")) return true;
  const address = name.replace(/%.*$/, "");
  const version = isIP(address);
  return version !== 0 && LOCAL_ADDRESSES.check(address, version === 4 ? "ipv4" : "ipv6");
}
