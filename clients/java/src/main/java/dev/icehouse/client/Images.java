package dev.icehouse.client;

import com.google.protobuf.ByteString;
import dev.icehouse.v1.ImagePart;

/** Images for {@link Conversation#say}: the contents of a PNG, JPEG, WebP or GIF file. */
public final class Images {
  private Images() {}

  /** Returns an image. */
  public static ImagePart of(byte[] data) {
    return of(data, "");
  }

  /** Returns an image with its media type, such as "image/png", for the error where the bytes are no image. */
  public static ImagePart of(byte[] data, String mediaType) {
    return ImagePart.newBuilder().setData(ByteString.copyFrom(data)).setMediaType(mediaType).build();
  }
}
