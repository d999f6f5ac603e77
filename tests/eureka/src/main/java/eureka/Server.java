package eureka;

import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.cloud.netflix.eureka.server.EnableEurekaServer;

/** A Eureka server with the settings of its command line. */
@SpringBootApplication
@EnableEurekaServer
public class Server {
    public static void main(String[] arguments) {
        SpringApplication.run(Server.class, arguments);
    }
}
