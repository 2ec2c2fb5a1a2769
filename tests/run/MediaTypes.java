import org.apache.hadoop.shaded.javax.ws.rs.core.Application;
import org.apache.hadoop.shaded.javax.ws.rs.core.Link;
import org.apache.hadoop.shaded.javax.ws.rs.core.MediaType;
import org.apache.hadoop.shaded.javax.ws.rs.core.Response;
import org.apache.hadoop.shaded.javax.ws.rs.core.UriBuilder;
import org.apache.hadoop.shaded.javax.ws.rs.core.Variant;
import org.apache.hadoop.shaded.javax.ws.rs.ext.RuntimeDelegate;

/** Reads the types of answers for Hadoop's client of WebHDFS: the jar in which Spark brings it lacks the class that does. */
public class MediaTypes extends RuntimeDelegate {
    private static final class Reader implements HeaderDelegate<MediaType> {
        @Override
        public MediaType fromString(String text) {
            String[] parts = text.split(";")[0].trim().split("/");
            return new MediaType(parts[0], parts[1]);
        }

        @Override
        public String toString(MediaType type) {
            return type.getType() + "/" + type.getSubtype();
        }
    }

    @Override
    @SuppressWarnings("unchecked")
    public <T> HeaderDelegate<T> createHeaderDelegate(Class<T> type) {
        return type == MediaType.class ? (HeaderDelegate<T>) new Reader() : null;
    }

    @Override
    public UriBuilder createUriBuilder() {
        throw new UnsupportedOperationException();
    }

    @Override
    public Response.ResponseBuilder createResponseBuilder() {
        throw new UnsupportedOperationException();
    }

    @Override
    public Variant.VariantListBuilder createVariantListBuilder() {
        throw new UnsupportedOperationException();
    }

    @Override
    public <T> T createEndpoint(Application application, Class<T> type) {
        throw new UnsupportedOperationException();
    }

    @Override
    public Link.Builder createLinkBuilder() {
        throw new UnsupportedOperationException();
    }
}
