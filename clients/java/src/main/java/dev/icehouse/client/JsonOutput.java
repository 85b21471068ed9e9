package dev.icehouse.client;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonObject;
import dev.icehouse.v1.FinishReason;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.ResponseFormat;
import java.lang.reflect.ParameterizedType;
import java.lang.reflect.RecordComponent;
import java.lang.reflect.Type;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.Arrays;
import java.util.Collection;
import java.util.Map;
import java.util.Set;

/**
 * Outputs in JSON that are read into a record: {@link #format} constrains the output to the schema of the record.
 *
 * <p>A component of the record is a String, a boolean, a number, an enum, another record, a List, a Set or an array of
 * these, or a Map from String to one of them. All components are required; others do not occur.
 *
 * @param <T> the record
 */
public final class JsonOutput<T> {
  private static final Gson GSON = new Gson();
  private static final Set<Class<?>> INTEGERS =
      Set.of(
          int.class, long.class, short.class, byte.class,
          Integer.class, Long.class, Short.class, Byte.class, BigInteger.class);
  private static final Set<Class<?>> NUMBERS =
      Set.of(float.class, double.class, Float.class, Double.class, BigDecimal.class);

  private final Class<T> type;

  private JsonOutput(Class<T> type) {
    this.type = type;
  }

  /** Returns the format and the reader of a record. */
  public static <T> JsonOutput<T> of(Class<T> type) {
    return new JsonOutput<>(type);
  }

  /** Returns the JSON schema of the record; throws IllegalArgumentException for a component of another type. */
  public String schema() {
    return schemaOf(type).toString();
  }

  /** Returns the format that constrains an output to the schema. */
  public ResponseFormat format() {
    return ResponseFormat.newBuilder().setJsonSchema(schema()).build();
  }

  /** Returns the value of an output. Throws IllegalStateException if a limit cut it. */
  public T read(GenerateResponse response) {
    if (response.getFinishReason() != FinishReason.FINISH_REASON_STOP_TOKEN) {
      throw new IllegalStateException(
          "the output ended with " + response.getFinishReason() + " before it was complete");
    }
    return GSON.fromJson(response.getText(), type);
  }

  /** Returns the request with this format, unless it has one of its own. */
  GenerateRequest asked(GenerateRequest request) {
    return request.hasResponseFormat() ? request : request.toBuilder().setResponseFormat(format()).build();
  }

  private static JsonObject schemaOf(Type type) {
    if (type instanceof ParameterizedType generic && generic.getRawType() instanceof Class<?> raw) {
      if (Collection.class.isAssignableFrom(raw)) {
        return listOf(generic.getActualTypeArguments()[0]);
      }
      if (raw == Map.class && generic.getActualTypeArguments()[0] == String.class) {
        var schema = named("object");
        schema.add("additionalProperties", schemaOf(generic.getActualTypeArguments()[1]));
        return schema;
      }
    }
    if (type instanceof Class<?> plain) {
      return schemaOf(plain);
    }
    throw unreadable(type);
  }

  private static JsonObject schemaOf(Class<?> type) {
    if (type == String.class) {
      return named("string");
    } else if (type == boolean.class || type == Boolean.class) {
      return named("boolean");
    } else if (INTEGERS.contains(type)) {
      return named("integer");
    } else if (NUMBERS.contains(type)) {
      return named("number");
    } else if (type.isArray()) {
      return listOf(type.getComponentType());
    } else if (type.isEnum()) {
      var names = new JsonArray();
      Arrays.stream(type.getEnumConstants()).forEach(constant -> names.add(((Enum<?>) constant).name()));
      var schema = new JsonObject();
      schema.add("enum", names);
      return schema;
    } else if (type.isRecord()) {
      return recordOf(type);
    }
    throw unreadable(type);
  }

  private static IllegalArgumentException unreadable(Type type) {
    String name = type.getTypeName();
    return new IllegalArgumentException(name + " cannot be read from JSON here; give the request a response format");
  }

  private static JsonObject recordOf(Class<?> type) {
    var properties = new JsonObject();
    var required = new JsonArray();
    for (RecordComponent component : type.getRecordComponents()) {
      properties.add(component.getName(), schemaOf(component.getGenericType()));
      required.add(component.getName());
    }
    var schema = named("object");
    schema.add("properties", properties);
    schema.add("required", required);
    schema.addProperty("additionalProperties", false);
    return schema;
  }

  private static JsonObject listOf(Type items) {
    var schema = named("array");
    schema.add("items", schemaOf(items));
    return schema;
  }

  private static JsonObject named(String type) {
    var schema = new JsonObject();
    schema.addProperty("type", type);
    return schema;
  }
}
