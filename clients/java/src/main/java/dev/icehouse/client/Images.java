package dev.icehouse.client;

import com.google.protobuf.ByteString;
import dev.icehouse.v1.ImagePart;

/** Pictures for {@link Conversation#say}: PNG, JPEG, WebP or GIF, as they are in their files. */
public final class Images {
  private Images() {}

  /** Returns a picture of whatever type its bytes say. */
  public static ImagePart of(byte[] data) {
    return of(data, "");
  }

  /** Returns a picture that must be of this type, such as "image/png". */
  public static ImagePart of(byte[] data, String mediaType) {
    return ImagePart.newBuilder().setData(ByteString.copyFrom(data)).setMediaType(mediaType).build();
  }
}
