package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import javax.tools.ToolProvider;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** The code in README.md compiles. `make test-clients` also runs its first block. */
class ReadmeTest {
  private static final Pattern BLOCK = Pattern.compile("^``` java\\n(.*?)^```$", Pattern.MULTILINE | Pattern.DOTALL);

  /** What the blocks use, each in a scope of its own. */
  private static final String PROGRAM =
      """
      import dev.icehouse.client.*;
      import dev.icehouse.v1.*;
      import io.grpc.*;
      import java.io.*;
      import java.nio.file.*;
      import java.time.*;
      import java.util.concurrent.Flow;

      class Readme {
        void run(
            IcehouseClient client, Conversation talk, GenerateRequest request, Flow.Subscriber<String> subscriber)
            throws Exception {
          %s
        }
      }
      """;

  @Test
  void theCodeInTheReadmeCompiles(@TempDir Path folder) throws Exception {
    List<String> blocks =
        BLOCK.matcher(Files.readString(Path.of("README.md"))).results().map(block -> block.group(1)).toList();
    assertTrue(blocks.size() > 8, () -> "there are " + blocks.size());
    Path file = folder.resolve("Readme.java");
    Files.writeString(file, PROGRAM.formatted(blocks.stream().collect(Collectors.joining("}\n{", "{", "}"))));
    var compiler = ToolProvider.getSystemJavaCompiler();
    var problems = new StringWriter();
    try (var files = compiler.getStandardFileManager(null, null, null)) {
      var path = System.getProperty("surefire.test.class.path", System.getProperty("java.class.path"));
      var options = List.of("-classpath", path, "-proc:none", "-d", folder.toString());
      var task = compiler.getTask(problems, files, null, options, null, files.getJavaFileObjects(file));
      assertTrue(task.call(), problems::toString);
    }
  }
}
